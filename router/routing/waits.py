"""What a request says about its wait in the router, and how that wait ends."""

import math
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvroute.contract.priority import Priority

# Why a request had to wait. busy: every replica had enough to do. order: others were before it.
Reason = Literal["none", "busy", "order"]

# Why a client gets an error and no answer. forecast: it would wait longer than it may. deadline: it
# has waited longer. full: too many requests wait. no_replica: none runs.
Refusal = Literal["forecast", "deadline", "full", "no_replica"]


class Urgency(Struct, frozen=True):
    """When a request wants its turn."""

    priority: Priority = "default"
    later_s: float = 0.0  # by which its turn is later, as its client says in numbers
    most_s: float = math.inf  # that it may wait in the queue
    own_s: float | None = None  # the same, if the request says so itself

    @property
    def is_batch(self) -> bool:
        return self.priority == "batch"

    @property
    def is_interactive(self) -> bool:
        """Return whether its turn comes before those of others that came with it."""
        return self.priority == "interactive"

    def without_bound(self) -> "Urgency":
        """It may wait for as long as it takes."""
        return replace(self, most_s=math.inf, own_s=None)


AT_EASE = Urgency()


class Wait(Struct, frozen=True):
    """One request's wait in the router."""

    priority: Priority = "default"
    reason: Reason = "none"
    waited_s: float = 0.0
    forecast_s: float = 0.0  # as it was forecast when the request came


NO_WAIT = Wait()
