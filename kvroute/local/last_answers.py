"""Running answers finish before `kvroute serve` stops."""

import time
from collections.abc import Callable
from typing import Any

from kvroute.local.progress import Progress

POLL_S = 0.2
TELL_S = 5.0  # between two lines that say how many answers are left
CALL_S = 2.0  # for all routers to answer a call; one that hangs must not hold up the others
KNOWN_S = 1.0  # in which Serve tells which routers there are; without any, nothing is running
LAST_ERRORS_S = 2.0  # for the errors of those that are ended to reach their clients


def finish_answers(routers: Any, progress: Progress, *, within_s: float) -> None:
    """Have all routers refuse new requests, and return when what they were answering has ended.

    Answers that have not ended within this time end with an error.

    Args:
        routers: Serve's handle of their deployment.
    """
    began_s = time.monotonic()
    _wait(lambda: int(_call(routers, "stop") == []), began_s + KNOWN_S)
    if _wait(lambda: _left(routers), began_s + within_s, _Telling(progress, within_s)):
        return
    progress.say("the time is over: the remaining answers end with an error")
    _call(routers, "end_answers")
    _wait(lambda: _left(routers), time.monotonic() + LAST_ERRORS_S)


class _Telling:
    """Says how many answers are running, now and then."""

    def __init__(self, progress: Progress, within_s: float) -> None:
        self._progress = progress
        self._within_s = within_s
        self._next_s = time.monotonic()

    def __call__(self, left: int) -> None:
        if time.monotonic() < self._next_s:
            return
        self._next_s = time.monotonic() + TELL_S
        running = "1 answer is" if left == 1 else f"{left} answers are"
        self._progress.say(
            f"{running} still running, up to {self._within_s:g} s; Ctrl-C again stops at once"
        )


def _wait(
    left: Callable[[], int | None],
    deadline: float,
    tell: Callable[[int], None] = lambda left: None,
) -> bool:
    """Return whether nothing is left in time. None: it is unknown how much is left."""
    while (number := left()) != 0:
        if time.monotonic() >= deadline:
            return False
        if number is not None:
            tell(number)
        time.sleep(POLL_S)
    return True


def _left(routers: Any) -> int | None:
    """Return how many answers are running; None if a router does not say."""
    found = _call(routers, "stop")
    return None if found is None else sum(found)


def _call(routers: Any, method: str) -> list[Any] | None:
    """Return what all routers return; empty if there are none, None if one fails or hangs."""
    from ray.exceptions import RayError
    from ray.serve.exceptions import DeploymentUnavailableError

    try:
        return list(routers.broadcast(method).results(timeout_s=CALL_S))
    except DeploymentUnavailableError:
        return []
    except (RayError, TimeoutError):
        return None
