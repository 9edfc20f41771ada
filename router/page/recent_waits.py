"""Waits in the queue and rejected requests of the last five minutes.

`kvroute doctor` and the live page show them.

Waits of batch requests are not counted, since batch requests are expected to wait.
"""

import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from kvroute.contract.priority import Priority
from kvroute.router.admission.waits import Refusal, Wait
from kvroute.router.page.recent import BUCKET_S, WINDOW_S
from kvroute.router.placement.attempts import RequestObserver


@dataclass(slots=True)
class _Bucket:
    """Sums over one part of the window, which is BUCKET_S long."""

    number: int
    waits: int = 0  # requests that had to wait
    waited_s: float = 0.0  # sum of their waits
    longest_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # rejected requests by reason


class RecentWaits(RequestObserver):
    """Counts waits and rejections, which takes a microsecond for each of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[_Bucket] = deque()  # oldest first

    def waited(self, wait: Wait) -> None:
        if wait.priority == "batch":
            return
        bucket = self._now()
        bucket.waits += 1
        bucket.waited_s += wait.waited_s
        bucket.longest_s = max(bucket.longest_s, wait.waited_s)

    def rejected(self, priority: Priority, refusal: Refusal) -> None:
        if priority == "batch":
            return
        self._now().refused[refusal] += 1

    def as_json(self) -> dict[str, Any]:
        """Return how many requests waited, for how long, and the rejections by reason."""
        self._drop_old()
        waits = sum(bucket.waits for bucket in self._buckets)
        waited_s = sum(bucket.waited_s for bucket in self._buckets)
        refused = Counter[str]()
        for bucket in self._buckets:
            refused.update(bucket.refused)
        return {
            "window_s": WINDOW_S,
            "waited": waits,
            "mean_s": round(waited_s / max(1, waits), 3),
            "longest_s": round(max((bucket.longest_s for bucket in self._buckets), default=0.0), 3),
            "refused": dict(refused),
        }

    def _now(self) -> _Bucket:
        number = self._drop_old()
        if not self._buckets or self._buckets[-1].number != number:
            self._buckets.append(_Bucket(number))
        return self._buckets[-1]

    def _drop_old(self) -> int:
        """Drop buckets that are too old, and return the number of the current bucket."""
        now = int(self._clock() // BUCKET_S)
        while self._buckets and self._buckets[0].number <= now - WINDOW_S // BUCKET_S:
            self._buckets.popleft()
        return now
