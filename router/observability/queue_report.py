"""What `kvroute status` and the doctor show of the queue: who waits, and who had to wait.

Recent waits are those of the last five minutes. Those of batch requests are not counted, since
batch requests are expected to wait.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kvroute.contract.priority import Priority
from kvroute.router.observability.rolling_window import WINDOW_S, RollingWindow
from kvroute.router.placement.attempts import RequestObserver
from kvroute.router.placement.waits import Wait
from kvroute.router.queueing.queue import Queue, QueueState


@dataclass(slots=True)
class _Sums:
    """The sums of one part of the window."""

    waits: int = 0  # requests that had to wait
    waited_s: float = 0.0  # sum of their waits
    longest_s: float = 0.0
    refused: Counter[str] = field(default_factory=Counter)  # rejected requests by reason


class RecentWaits(RequestObserver):
    """Counts waits and rejections, which takes a microsecond for each of them."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._window = RollingWindow(clock, _Sums)

    def waited(self, wait: Wait) -> None:
        if wait.priority == "batch":
            return
        sums = self._window.current()
        sums.waits += 1
        sums.waited_s += wait.waited_s
        sums.longest_s = max(sums.longest_s, wait.waited_s)

    def rejected(self, priority: Priority, refusal: str) -> None:
        if priority == "batch":
            return
        self._window.current().refused[refusal] += 1

    def as_json(self) -> dict[str, Any]:
        """Return how many requests waited, for how long, and the rejections by reason."""
        parts = self._window.parts()
        waits = sum(part.waits for part in parts)
        waited_s = sum(part.waited_s for part in parts)
        refused = Counter[str]()
        for part in parts:
            refused.update(part.refused)
        return {
            "window_s": WINDOW_S,
            "waited": waits,
            "mean_s": round(waited_s / max(1, waits), 3),
            "longest_s": round(max((part.longest_s for part in parts), default=0.0), 3),
            "refused": dict(refused),
        }


def queue_report(queue: Queue[Any], now_s: float) -> dict[str, Any]:
    """Return the number of requests, their prefill and the oldest wait, in total and by line.

    `all_routers` includes the queues of other routers as they last reported them. These reports
    leave out background requests (queueing/queue.py).
    """
    lines = queue.state(now_s)
    here, elsewhere = _total(lines.values()), queue.in_other_routers()
    everywhere = _total([here, elsewhere])
    return _state(here) | {
        "lines": {name: _state(state) for name, state in lines.items()},
        "all_routers": {
            "requests": everywhere.requests,
            "prefill_s": round(everywhere.prefill_s, 3),
        },
    }


def _total(states: Iterable[QueueState]) -> QueueState:
    """Return the sum of several lines or routers, with the longest wait of all."""
    states = list(states)
    return QueueState(
        sum(state.requests for state in states),
        sum(state.prefill_s for state in states),
        max((state.oldest_s for state in states), default=0.0),
    )


def _state(state: QueueState) -> dict[str, Any]:
    return {
        "requests": state.requests,
        "prefill_s": round(state.prefill_s, 3),
        "oldest_s": round(state.oldest_s, 3),
    }
