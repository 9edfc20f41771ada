"""A request's preparation in a replica: from its arrival until the engine has it.

A replica parses, renders and checks a request on its event loop. If the loop hangs, the router
suspects the requests that the replica was preparing: the replica reports when it begins and when it
finishes the preparation of a request.
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
