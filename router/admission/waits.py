"""The urgency of a request, and the record of its wait in the router."""

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvroute.contract.priority import Priority

# Reason of a wait. busy: every replica had a backlog. order: other requests came first. seat: the
# request's session had no seat.
Reason = Literal["none", "busy", "order", "seat"]

# Reason for which a request is refused. forecast: its expected wait exceeds its limit. deadline: it
# has waited for as long as its limit. full: too many requests wait. no_replica: no replica runs.
# no_seat: its session would have to wait too long for a seat, or has waited too long.
Refusal = Literal["forecast", "deadline", "full", "no_replica", "no_seat"]


MIN_S = 0.001  # smallest wait limit in seconds, also if the deadline has passed


class Urgency(Struct, frozen=True):
    """The priority of a request in the queue, and the limits of its wait."""

    priority: Priority = "default"
    delay_s: float = 0.0  # delay of its turn in seconds, from the `priority` in the body
    max_wait_s: float = math.inf  # longest wait in the queue, in seconds
    requested_wait_s: float | None = None  # max_wait_s, if the request has set it by a deadline
    # Longest time in seconds until a replica starts the request, set by the request.
    deadline_s: float = math.inf

    @property
    def is_batch(self) -> bool:
        return self.priority == "batch"

    @property
    def is_interactive(self) -> bool:
        """Return whether the request comes before others that arrived at the same time."""
        return self.priority == "interactive"

    def without_limit(self) -> "Urgency":
        """Return the same urgency without a limit of the wait."""
        return replace(self, max_wait_s=math.inf, requested_wait_s=None)

    def after_waiting(self, waited_s: float) -> "Urgency":
        """Return the urgency for the queue, after a wait for a seat.

        The wait for the seat counts towards the deadline.
        """
        left_s = self.deadline_s - waited_s
        if left_s >= self.max_wait_s:
            return self
        left_s = max(MIN_S, left_s)
        return replace(self, max_wait_s=left_s, requested_wait_s=left_s)


DEFAULT_URGENCY = Urgency()


class Wait(Struct, frozen=True):
    """The wait of one request in the router."""

    priority: Priority = "default"
    reason: Reason = "none"
    waited_s: float = 0.0  # seconds from its arrival until it was sent to a replica
    forecast_s: float = 0.0  # wait in seconds that was forecast when the request arrived
    seat_s: float = 0.0  # the part of waited_s during which it waited for a seat

    def after_seat(self, seat_s: float) -> "Wait":
        """Return this wait together with an earlier wait for a seat."""
        if not seat_s:
            return self
        return replace(self, reason="seat", waited_s=self.waited_s + seat_s, seat_s=seat_s)


NO_WAIT = Wait()
