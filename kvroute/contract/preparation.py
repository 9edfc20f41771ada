"""Reports the end of a request's preparation in a replica.

The preparation lasts from the arrival of a request until the engine has it: the replica parses,
renders and checks the request on its event loop. If the loop hangs, the router suspects the
requests that the replica was preparing. So the replica reports the start and the end of each
preparation.
"""

from collections.abc import Callable
from contextvars import ContextVar

_REPORT: ContextVar[Callable[[], object] | None] = ContextVar("_REPORT", default=None)


def on_prepared(report: Callable[[], object]) -> None:
    """Have `report` called when the current task's request is prepared."""
    _REPORT.set(report)


def prepared() -> None:
    """Report that the current task's request goes to the engine; later calls do nothing."""
    if report := _REPORT.get():
        _REPORT.set(None)
        report()
