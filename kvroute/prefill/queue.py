"""The prompts that wait for one engine, and how long their prefill will take.

A router counts the requests that it sent or that its peers reported; a replica counts those that
arrived. In addition a router counts decoding requests, a replica its busy time. The caller passes
the time, in seconds of any monotonic clock.
"""

import math
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvroute.prefill.speed import PrefillSpeed

JUST = 1e-6  # share by which a backlog is below another one, so that rounding does not matter


class Prefill(Protocol):
    """A waiting prompt."""

    @property
    def prefill_s(self) -> float:
        """The predicted prefill time."""

    @property
    def ready_s(self) -> float:
        """From when on the engine can compute it."""


P = TypeVar("P", bound=Prefill)


@dataclass(slots=True, kw_only=True)
class PrefillQueue(Generic[P]):
    waiting: dict[str, P] = field(default_factory=dict)  # no first token yet, oldest first
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)  # learned from first tokens
    unknown_s: float = 0.0  # estimated prefill of requests of routers that are not heard
    last_first_token_s: float = -math.inf
    # Derived values, updated with every change: each decision reads those of all replicas.
    waiting_s: float = 0.0
    head_s: float = 0.0  # predicted prefill of the oldest waiting request
    busy_since_s: float = -math.inf  # its earliest possible start: not before the last first token

    def join(self, request_id: str, prefill: P) -> None:
        self.waiting[request_id] = prefill
        self.waiting_s += prefill.prefill_s
        self._find_head()

    def leave(self, request_id: str) -> P | None:
        """Removes a request; None: it was not waiting."""
        prefill = self.waiting.pop(request_id, None)
        if prefill is None:
            return None
        if self.waiting:
            self._find_head()
            self.waiting_s -= prefill.prefill_s
        else:  # reset the sums, so that rounding errors do not accumulate over days
            self.head_s = self.waiting_s = 0.0
            self.busy_since_s = -math.inf
        return prefill

    def served(self, request_id: str, now_s: float, *, teaches: bool = True) -> P | None:
        """Its first token came, from which the engine's speed is learned; None: it did not wait."""
        prefill = self.waiting.get(request_id)
        if prefill is None:
            return None
        if teaches:
            # Measured from the start of the oldest request, whichever first token comes first:
            # those of one step arrive in any order, and those of other routers arrive later.
            begun_s = self._begun_s()
            is_alone = len(self.waiting) == 1 and begun_s == prefill.ready_s
            self.speed.first_token(
                prefill.prefill_s, now_s - begun_s, queued_s=self.waiting_s, is_alone=is_alone
            )
        self.last_first_token_s = now_s
        return self.leave(request_id)

    def backlog_s(self, slowness: float, now_s: float) -> float:
        """Seconds of prefill queued or running, minus the time already spent on the oldest. Every
        decision asks each replica, and `min` and `max` would take half of the time."""
        had_s, head_s = now_s - self.busy_since_s, slowness * self.head_s
        had_s = head_s if head_s < had_s else had_s
        left_s = slowness * (self.waiting_s + self.unknown_s) - (had_s if had_s > 0.0 else 0.0)
        return left_s if left_s > 0.0 else 0.0

    def below_in_s(self, backlog_s: float, now_s: float) -> float:
        """Return the time until the backlog is below that, while no first token comes; infinite:
        it will not be."""
        slowness = self.speed.slowness
        excess_s = self.backlog_s(slowness, now_s) - backlog_s
        left_s = slowness * self.head_s - max(0.0, now_s - self.busy_since_s)
        after_s = excess_s + JUST * backlog_s
        return max(0.0, after_s) if after_s < left_s else math.inf

    def _begun_s(self) -> float:
        """When the engine could begin with what it has computed now."""
        return self.busy_since_s

    def _find_head(self) -> None:
        head = next(iter(self.waiting.values()))
        self.head_s = head.prefill_s
        self.busy_since_s = max(head.ready_s, self.last_first_token_s)
