"""A request's preparation in a replica: from its arrival until the engine has it.

A replica parses, renders and checks a request on its event loop. A request that stops the loop
there is the only cause that can be told from outside: the router knows of each request whether the
replica has begun to prepare it, and whether it has ended that.
"""

from collections.abc import Callable
from contextvars import ContextVar

_REPORT: ContextVar[Callable[[], object] | None] = ContextVar("_REPORT", default=None)


def on_prepared(report: Callable[[], object]) -> None:
    """Have `report` called when the current task's request is prepared."""
    _REPORT.set(report)


def prepared() -> None:
    """Report that the current task's request goes to the engine now; only the first call does."""
    if report := _REPORT.get():
        _REPORT.set(None)
        report()
