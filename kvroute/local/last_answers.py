"""Waits for running answers to finish before `kvroute serve` stops."""

import time
from collections.abc import Callable
from typing import Any

from kvroute.local.progress import StartProgress

POLL_S = 0.2  # seconds between two queries for the number of running answers
REPORT_S = 5.0  # seconds between two printed lines with that number
CALL_S = 2.0  # timeout of a call to all routers, so that a hanging router cannot block the stop
DISCOVERY_S = 1.0  # if Serve has listed no router after these seconds, no router is running
LAST_ERRORS_S = 2.0  # seconds for clients to receive the errors of interrupted answers


def finish_answers(routers: Any, progress: StartProgress, *, within_s: float) -> None:
    """Make all routers refuse new requests, and wait until their running answers have ended.

    Args:
        routers: Serve's handle of the routers' deployment.
        progress: Prints how many answers are still running.
        within_s: Seconds that running answers have to end; those that still run end with an error.
    """
    start_s = time.monotonic()
    _wait(lambda: int(_call(routers, "stop") == []), start_s + DISCOVERY_S)
    if _wait(lambda: _left(routers), start_s + within_s, _Reporter(progress, within_s)):
        return
    progress.say("the time limit has passed: the remaining answers end with an error")
    _call(routers, "end_answers")
    _wait(lambda: _left(routers), time.monotonic() + LAST_ERRORS_S)


class _Reporter:
    """Prints the number of running answers every REPORT_S."""

    def __init__(self, progress: StartProgress, within_s: float) -> None:
        self._progress = progress
        self._within_s = within_s
        self._next_s = time.monotonic()

    def __call__(self, left: int) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + REPORT_S
        running = "1 answer is" if left == 1 else f"{left} answers are"
        self._progress.say(
            f"{running} still running, and may run up to {self._within_s:g} s; "
            "press Ctrl-C again to stop at once"
        )


def _wait(
    left: Callable[[], int | None],
    deadline: float,
    report: Callable[[int], None] = lambda left: None,
) -> bool:
    """Poll `left()` until it returns 0 or the deadline has passed; return whether it returned 0.

    `left()` returns None while the number is unknown.
    """
    while (number := left()) != 0:
        if time.monotonic() >= deadline:
            return False
        if number is not None:
            report(number)
        time.sleep(POLL_S)
    return True


def _left(routers: Any) -> int | None:
    """Return the number of running answers, or None if a router does not respond.

    Each router's method `stop` returns its own number; only the first call changes the router.
    """
    running = _call(routers, "stop")
    return None if running is None else sum(running)


def _call(routers: Any, method: str) -> list[Any] | None:
    """Call a method of all routers; return their results, or None if a router fails."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        return list(routers.broadcast(method).results(timeout_s=CALL_S))
    except DeploymentUnavailableError:
        return []
    except (RayError, TimeoutError):
        return None
