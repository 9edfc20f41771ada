"""JSON of the requests that wait in a router's queue, and in the queues of all routers."""

from collections.abc import Iterable
from typing import Any

from kvroute.router.queueing.queue import Queue, QueueState


def as_json(queue: Queue[Any], now_s: float) -> dict[str, Any]:
    """Return the number of requests, their prefill and the oldest wait, in total and by line.

    `all_routers` includes the queues of other routers as they last reported them. These reports
    leave out background requests (queueing/queue.py).
    """
    lines = queue.state(now_s)
    here, elsewhere = total(lines.values()), queue.in_other_routers()
    everywhere = total([here, elsewhere])
    return _state(here) | {
        "lines": {name: _state(state) for name, state in lines.items()},
        "all_routers": {
            "requests": everywhere.requests,
            "prefill_s": round(everywhere.prefill_s, 3),
        },
    }


def total(states: Iterable[QueueState]) -> QueueState:
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
