"""Waits for running answers to finish before `kvroute serve` stops."""

import time
from collections.abc import Callable
from typing import Any

from kvroute.local.progress import Progress

POLL_S = 0.2  # seconds between two counts of the running answers
REPORT_S = 5.0  # seconds between two printed lines with the number of running answers
CALL_S = 2.0  # seconds for all routers to answer a call: a hanging router must not block the stop
DISCOVERY_S = 1.0  # seconds for Serve to list the routers; without routers, nothing is running
LAST_ERRORS_S = 2.0  # seconds for the errors of interrupted answers to reach their clients


def finish_answers(routers: Any, progress: Progress, *, within_s: float) -> None:
    """Make all routers refuse new requests, and return when their running answers have ended.

    Args:
        routers: Serve's handle of the routers' deployment.
        progress: Prints how many answers are still running.
        within_s: Answers that are still running after this time end with an error.
    """
    began_s = time.monotonic()
    _wait(lambda: int(_call(routers, "stop") == []), began_s + DISCOVERY_S)
    if _wait(lambda: _left(routers), began_s + within_s, _Reporter(progress, within_s)):
        return
    progress.say("the time limit has passed: the remaining answers end with an error")
    _call(routers, "end_answers")
    _wait(lambda: _left(routers), time.monotonic() + LAST_ERRORS_S)


class _Reporter:
    """Prints every REPORT_S how many answers are running."""

    def __init__(self, progress: Progress, within_s: float) -> None:
        self._progress = progress
        self._within_s = within_s
        self._next_s = time.monotonic()

    def __call__(self, left: int) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + REPORT_S
        running = "1 answer is" if left == 1 else f"{left} answers are"
        self._progress.say(
            f"{running} still running, up to {self._within_s:g} s; Ctrl-C again stops at once"
        )


def _wait(
    left: Callable[[], int | None],
    deadline: float,
    report: Callable[[int], None] = lambda left: None,
) -> bool:
    """Return whether `left()` became 0 in time; it returns None while the number is unknown."""
    while (number := left()) != 0:
        if time.monotonic() >= deadline:
            return False
        if number is not None:
            report(number)
        time.sleep(POLL_S)
    return True


def _left(routers: Any) -> int | None:
    """Return how many answers are running; None if a router does not respond."""
    running = _call(routers, "stop")
    return None if running is None else sum(running)


def _call(routers: Any, method: str) -> list[Any] | None:
    """Return every router's result; empty without routers, None if one fails or hangs."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        return list(routers.broadcast(method).results(timeout_s=CALL_S))
    except DeploymentUnavailableError:
        return []
    except (RayError, TimeoutError):
        return None
