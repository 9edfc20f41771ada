"""Reports the end of a request's preparation in a replica.

The preparation lasts from the arrival of a request until the engine has it: the replica parses,
renders and checks the request on its event loop. If the loop hangs, the router suspects the
requests in preparation. So the replica reports to the router when each preparation starts and ends.
"""

from collections.abc import Callable
from contextvars import ContextVar

_REPORT: ContextVar[Callable[[], object] | None] = ContextVar("_REPORT", default=None)


def on_prepared(report: Callable[[], object]) -> None:
    """Set the function that `prepared` calls for the request of the current asyncio task."""
    _REPORT.set(report)


def prepared() -> None:
    """Report that the preparation of the current task's request has ended.

    Only the first call for a request has an effect.
    """
    if report := _REPORT.get():
        _REPORT.set(None)
        report()
