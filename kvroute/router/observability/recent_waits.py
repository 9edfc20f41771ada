"""A router counts the waits and refusals of the last five minutes, for the doctor and the page."""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvroute.contract.priority import Priority
from kvroute.router.observability.recent import BUCKET_S, WINDOW_S
from kvroute.router.routing.attempts import RequestObserver
from kvroute.router.routing.waits import Refusal, Wait


@dataclass(slots=True)
class Waits:
    """Of one class of requests."""

    requests: int = 0
    sum_s: float = 0.0
    longest_s: float = 0.0

    def add(self, requests: int, sum_s: float, longest_s: float) -> None:
        self.requests += requests
        self.sum_s += sum_s
        self.longest_s = max(self.longest_s, longest_s)

    def as_json(self) -> dict[str, Any]:
        mean_s = self.sum_s / self.requests if self.requests else 0.0
        return {
            "requests": self.requests,
            "mean_s": round(mean_s, 3),
            "longest_s": round(self.longest_s, 3),
        }


@dataclass(slots=True)
class _Bucket:
    """What happened in BUCKET_S."""

    number: int
    waits: dict[str, Waits] = field(default_factory=dict)  # by class, as in Queue.state
    refused: Counter[str] = field(default_factory=Counter)  # by reason


class RecentWaits(RequestObserver):
    """Costs a microsecond for each request that waits or is refused."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[_Bucket] = deque()  # oldest first

    def waited(self, wait: Wait) -> None:
        class_ = "batch" if wait.priority == "batch" else "default"
        waits = self._now().waits.setdefault(class_, Waits())
        waits.add(1, wait.waited_s, wait.waited_s)

    def turned_away(self, priority: Priority, refusal: Refusal) -> None:
        self._now().refused[refusal] += 1

    def as_json(self) -> dict[str, Any]:
        """The sums: of requests that had to wait, by class, and of refusals by reason."""
        self._drop_old()
        waits, refused = dict[str, Waits](), Counter[str]()
        for bucket in self._buckets:
            refused.update(bucket.refused)
            for class_, each in bucket.waits.items():
                total = waits.setdefault(class_, Waits())
                total.add(each.requests, each.sum_s, each.longest_s)
        return {
            "window_s": WINDOW_S,
            "waited": {class_: each.as_json() for class_, each in waits.items()},
            "refused": dict(refused),
        }

    def _now(self) -> _Bucket:
        number = self._drop_old()
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _drop_old(self) -> int:
        """Drops buckets that are too old; returns the number of the current one."""
        now = int(self._clock() // BUCKET_S)
        while self._buckets and self._buckets[0].number <= now - WINDOW_S // BUCKET_S:
            self._buckets.popleft()
        return now
