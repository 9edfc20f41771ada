"""The urgency of a request, and the record of its wait in the router."""

import math
from collections.abc import Mapping
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

from kvroute.contract.priority import Priority

# Reason of a wait in the queue. none: there was no wait. busy: every replica had a backlog. order:
# other requests came first. room: no replica had room for a further batch request. Waits for
# features have reasons of their own (kvroute/features/line.py).
QueueReason = Literal["none", "busy", "order", "room"]

# Reason of a refusal by the queue. forecast: the request's expected wait exceeds its limit.
# deadline: it has waited for as long as its limit. full: too many requests wait. no_replica: no
# replica runs. Features have reasons of their own (Feature.refusals).
QueueRefusal = Literal["forecast", "deadline", "full", "no_replica"]
# Why a request is taken back from a replica whose engine has not started it: another replica can
# start it, or it has waited up to its limit.
TakenBack = Literal["moved", "deadline"]


MIN_S = 0.001  # smallest wait limit in seconds; used if an earlier wait used up the deadline


class Urgency(Struct, frozen=True):
    """The priority of a request in the queue, the limits of its wait, and who shares the queue."""

    priority: Priority = "default"
    # From `priority` in the body: the request is queued as if it had arrived this much later.
    delay_s: float = 0.0
    max_wait_s: float = math.inf  # longest wait in the queue, in seconds
    requested_wait_s: float | None = None  # max_wait_s; None if the request has not set it itself
    # The client's limit in seconds for all waits, for features and in the queue; inf: none.
    deadline_s: float = math.inf
    sharer: str = ""  # whose share of the queue the request uses: a tenant or user; empty: nobody's

    @property
    def is_batch(self) -> bool:
        return self.priority == "batch"

    @property
    def is_interactive(self) -> bool:
        """Return whether the request comes before requests of other classes that arrive with it."""
        return self.priority == "interactive"

    def without_limit(self) -> "Urgency":
        """Return the same urgency without a limit of the wait in the queue."""
        return replace(self, max_wait_s=math.inf, requested_wait_s=None)

    def after_waiting(self, waited_s: float) -> "Urgency":
        """Return the urgency for the rest of the way of a request that has waited for a feature.

        The wait in the queue is limited to what this wait has left of the deadline.

        Args:
            waited_s: seconds that the request has waited for the feature.
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
    reason: str = "none"  # a QueueReason, or the reason of a feature's line
    waited_s: float = 0.0  # seconds from its arrival until it was sent to a replica
    forecast_s: float = 0.0  # wait in seconds that was forecast when the request arrived
    # Reason of a feature's line -> the part of waited_s during which it waited in this line.
    held_s: Mapping[str, float] = {}

    def after_lines(self, held_s: Mapping[str, float]) -> "Wait":
        """Return this wait together with the earlier waits in the lines of features."""
        waited_s = self.waited_s + sum(held_s.values())
        waits = [reason for reason, wait_s in held_s.items() if wait_s]
        reason = waits[-1] if waits else self.reason
        return replace(self, reason=reason, waited_s=waited_s, held_s=held_s)


NO_WAIT = Wait()
