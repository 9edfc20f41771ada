"""A line: the requests of one router that wait until a feature lets them go.

A feature decides who may go, and only computes: callers pass the time, and wait. So a replay uses
the same line as a router. In a router, queueing/waiting_room.py waits, and refuses requests that
would wait too long.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from kvroute.router.placement.attempts import Placement, RequestContext

R = TypeVar("R")  # type of the caller's requests


@dataclass(slots=True, eq=False)
class Waiter(Generic[R]):
    """A request that waits until a feature lets it go."""

    request: R
    arrived_s: float  # time of arrival


W = TypeVar("W", bound=Waiter[Any])  # a waiter with what the feature knows about its request


class Line(Generic[R, W]):
    """The requests of one router that wait for one feature, before they are queued."""

    reason = ""  # a word for the wait, such as "seat"; requests are refused for no_REASON
    max_wait_s = 0.0  # the longest wait; 0: no limit
    recheck_s = 1.0  # a replay looks again after this time whether a waiting request may go

    def observe(self, placement: "Placement", *, is_busy: bool) -> None:
        """Record that a request has arrived, and whether every replica was busy then."""

    def ask(
        self, request: R, placement: "Placement", context: "RequestContext", now_s: float
    ) -> W | None:
        """Return the request as an item of the line; None: it may go.

        Args:
            context: what the router knows about the request; its `turn` is set.
        """
        raise NotImplementedError

    def add(self, waiter: W) -> None:
        """Add a request that has to wait."""
        raise NotImplementedError

    def remove(self, waiter: W) -> bool:
        """Remove a waiting request. Return whether it was waiting."""
        raise NotImplementedError

    def due(self, now_s: float) -> W | None:
        """Remove and return a waiting request that may go now; None if there is none."""
        raise NotImplementedError

    def record_wait(self, waited_s: float) -> None:
        """Record that a request has waited this long."""

    def forecast_s(self, waiter: W) -> float:
        """Return the expected wait of a new request in seconds; 0 if unknown."""
        return 0.0

    def refusal(
        self, problem: str, wait_s: float | None, then_s: float, deadline_s: float
    ) -> Exception:
        """Return the error for a request that waits too long.

        Args:
            problem: continues a message after "this request", such as "would wait".
            wait_s: the predicted wait of the request, or its wait so far; None: unknown.
            then_s: the predicted wait of a request that arrives now.
            deadline_s: the longest wait that the request allows.
        """
        raise NotImplementedError

    def __len__(self) -> int:
        """Return how many requests wait."""
        raise NotImplementedError
