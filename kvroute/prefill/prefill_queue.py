"""The prompts that wait for one engine, and the time that their prefill will take.

A router has such a queue for each replica (ReplicaLoad), with the requests that it has sent and
those that other routers have reported. A replica has one for its own engine (Backlog), with the
requests that have arrived. Callers pass the time, in seconds of any monotonic clock.

Slowness is measured time divided by predicted time (speed.py).
"""

import math
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from kvroute.prefill.speed import PrefillSpeed

# Tolerance for rounding errors: a backlog counts as below a limit only if it is lower than the
# limit by more than this share of the limit.
TOLERANCE = 1e-6


class Prefill(Protocol):
    """A prompt that waits for prefill, or is being computed."""

    @property
    def prefill_s(self) -> float:
        """Return the predicted prefill time."""

    @property
    def ready_s(self) -> float:
        """Return the earliest time at which the engine can start the prefill."""


P = TypeVar("P", bound=Prefill)


@dataclass(slots=True, kw_only=True)
class PrefillQueue(Generic[P]):
    """The prompts without a first token in one engine, in order of arrival."""

    waiting: dict[str, P] = field(default_factory=dict)  # prompts without a first token, by id
    speed: PrefillSpeed = field(default_factory=PrefillSpeed)  # learned from first tokens
    # Estimated seconds of prefill of the requests that this router does not know, since it gets no
    # messages from the routers that sent them.
    unknown_s: float = 0.0
    last_first_token_s: float = -math.inf  # time of the latest first token
    # Derived values, kept up to date because every placement reads them for all replicas.
    waiting_s: float = 0.0  # predicted prefill of all waiting requests
    head_s: float = 0.0  # predicted prefill of the oldest waiting request
    # Earliest time at which the oldest request can have started: not before the latest first token.
    busy_since_s: float = -math.inf

    def join(self, request_id: str, prefill: P) -> None:
        """Add a request."""
        self.waiting[request_id] = prefill
        self.waiting_s += prefill.prefill_s
        self._find_head()

    def leave(self, request_id: str) -> P | None:
        """Remove a request; return None if it was not waiting."""
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

    def finish_prefill(self, request_id: str, now_s: float, *, learn: bool = True) -> P | None:
        """Remove a request that has received its first token; return None if it was not waiting.

        If `learn` is True, learn the engine's speed from the time that the request took.
        """
        prefill = self.waiting.get(request_id)
        if prefill is None:
            return None
        if learn:
            # The time is measured from the start of the oldest request, not of this one. The order
            # of first tokens does not show which prompt was computed first: the first tokens of one
            # step arrive in any order, and other routers report theirs late.
            start_s = self._start_s()
            is_alone = len(self.waiting) == 1 and start_s == prefill.ready_s
            self.speed.first_token(
                prefill.prefill_s, now_s - start_s, queued_s=self.waiting_s, is_alone=is_alone
            )
        self.last_first_token_s = now_s
        return self.leave(request_id)

    def backlog_s(self, slowness: float, now_s: float) -> float:
        """Return the remaining seconds of prefill.

        The time since the start of the oldest request counts as done, up to that request's prefill.
        Every placement calls this for each replica, so it uses conditional expressions, which take
        half of the time that `min` and `max` take.
        """
        spent_s, head_s = now_s - self.busy_since_s, slowness * self.head_s
        spent_s = head_s if head_s < spent_s else spent_s
        left_s = slowness * (self.waiting_s + self.unknown_s) - (spent_s if spent_s > 0.0 else 0.0)
        return left_s if left_s > 0.0 else 0.0

    def time_until_below_s(self, backlog_s: float, now_s: float) -> float:
        """Return the seconds until the backlog is below `backlog_s` if no first token arrives.

        Without a first token, only the prefill of the oldest request can count as done. If that is
        too little, the result is infinite.
        """
        slowness = self.speed.slowness
        excess_s = self.backlog_s(slowness, now_s) - backlog_s
        left_s = slowness * self.head_s - max(0.0, now_s - self.busy_since_s)
        after_s = excess_s + TOLERANCE * backlog_s
        return max(0.0, after_s) if after_s < left_s else math.inf

    def _start_s(self) -> float:
        """Return when the engine can have started to compute the prompt that is now finished."""
        return self.busy_since_s

    def _find_head(self) -> None:
        head = next(iter(self.waiting.values()))
        self.head_s = head.prefill_s
        self.busy_since_s = max(head.ready_s, self.last_first_token_s)
