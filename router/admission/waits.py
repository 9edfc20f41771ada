"""What a request says about its wait in the router, and how that wait ends."""

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvroute.contract.priority import Priority

# Why a request had to wait. busy: every replica had enough to do. order: others were before it.
# seat: its session had no seat.
Reason = Literal["none", "busy", "order", "seat"]

# Why a client gets an error and no answer. forecast: it would wait longer than it may. deadline: it
# has waited longer. full: too many requests wait. no_replica: none runs. no_seat: its session had
# to wait too long for a seat.
Refusal = Literal["forecast", "deadline", "full", "no_replica", "no_seat"]


MIN_S = 0.001  # the least time that is left of a deadline


class Urgency(Struct, frozen=True):
    """When a request wants its turn."""

    priority: Priority = "default"
    later_s: float = 0.0  # delay of its turn that the client sets with a number
    most_s: float = math.inf  # longest wait in the queue
    own_s: float | None = None  # the same, if the request says so itself
    deadline_s: float = math.inf  # longest time until a replica begins, set by the request

    @property
    def is_batch(self) -> bool:
        return self.priority == "batch"

    @property
    def is_interactive(self) -> bool:
        """Return whether its turn comes before those of others that came with it."""
        return self.priority == "interactive"

    def without_bound(self) -> "Urgency":
        """Return the same urgency without a wait limit."""
        return replace(self, most_s=math.inf, own_s=None)

    def after(self, waited_s: float) -> "Urgency":
        """Return what is left of it for a request that has waited for a seat."""
        left_s = self.deadline_s - waited_s
        if left_s >= self.most_s:
            return self
        left_s = max(MIN_S, left_s)
        return replace(self, most_s=left_s, own_s=left_s)


AT_EASE = Urgency()


class Wait(Struct, frozen=True):
    """One request's wait in the router."""

    priority: Priority = "default"
    reason: Reason = "none"
    waited_s: float = 0.0
    forecast_s: float = 0.0  # wait that was forecast when the request came
    seat_s: float = 0.0  # the part of waited_s in which it waited for a seat

    def after_seat(self, seat_s: float) -> "Wait":
        """Return the wait of a request that had waited for a seat before."""
        if not seat_s:
            return self
        return replace(self, reason="seat", waited_s=self.waited_s + seat_s, seat_s=seat_s)


NO_WAIT = Wait()
