"""The wait of a new request for this engine is estimated from arrivals and first tokens.

The caller passes the time, in seconds of any monotonic clock.
"""

import math
from dataclasses import dataclass

from kvroute.prefill.queue import PrefillQueue

STEP_S = 0.02  # time of a first token in addition to its prompt's prefill
MEAN_SHARE = 0.05  # weight of the latest request in the mean
BUSY_S = 10.0  # time constant of the busy share's decay
ELSEWHERE_S = 3.0  # the same of what waited elsewhere: it says little once that is over


@dataclass(frozen=True, slots=True)
class _Pending:
    prefill_s: float  # at the engine's claimed speed
    ready_s: float  # when it came
    new_tokens: int


class Backlog:
    """The requests without a first token, and the speed learned from earlier first tokens.

    Any other delay of first tokens, such as a batch full of decoding requests, also makes the
    engine count as slow: the wait is the same.
    """

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._tokens_per_s = prefill_tokens_per_s
        self._queue: PrefillQueue[_Pending] = PrefillQueue()
        self._mean_s = 0.0  # of one request's prefill, as predicted
        self._busy_share = 0.0  # as of _updated_s
        self._updated_s = 0.0
        self._came = 0.0  # requests of late, as of _updated_s
        self._waited_s = 0.0  # what these had waited in their routers, in all

    def arrived(
        self, request_id: str, new_tokens: int, now_s: float, waited_s: float = 0.0
    ) -> None:
        """new_tokens: prompt tokens that are not expected in the KV cache. waited_s: in its
        router, until replicas had time."""
        self._advance(now_s)
        self._came += 1.0
        self._waited_s += waited_s
        prefill_s = STEP_S + new_tokens / self._tokens_per_s
        self._queue.join(request_id, _Pending(prefill_s, now_s, new_tokens))
        self._mean_s += (MEAN_SHARE if self._mean_s else 1.0) * (prefill_s - self._mean_s)

    def first_token(self, request_id: str, now_s: float) -> None:
        """The prefill is over; the speed is learned from its time."""
        self._advance(now_s)
        self._queue.served(request_id, now_s)

    def gone(self, request_id: str, now_s: float) -> None:
        """The request ended; no effect if it had its first token."""
        self._advance(now_s)
        self._queue.leave(request_id)

    @property
    def pending_tokens(self) -> int:
        """Prompt tokens to compute, of requests without a first token."""
        return sum(each.new_tokens for each in self._queue.waiting.values())

    def wait_s(self, now_s: float) -> float:
        """The time until all pending requests have their first token, after the mean wait in the
        routers of those that came of late."""
        queue, speed = self._queue, self._queue.speed
        slowness, had_s = speed.slowness, now_s - queue.busy_since_s
        if queue.waiting and had_s > slowness * queue.head_s:
            # overdue: the engine is at least as slow as if the first token came now
            slowness = speed.slowness_after(queue.head_s, had_s)
        return self._queued_s(now_s) + queue.backlog_s(slowness, now_s)

    def service_s(self) -> float:
        """The mean time that one request delays the others."""
        return self._mean_s * self._queue.speed.slowness

    def busy_share(self, now_s: float) -> float:
        """The share of recent time in which a request was pending."""
        self._advance(now_s)
        return self._busy_share

    def _queued_s(self, now_s: float) -> float:
        """It fades as nothing comes any more."""
        self._advance(now_s)
        return self._waited_s / max(1.0, self._came)

    def _advance(self, now_s: float) -> None:
        keep = math.exp((self._updated_s - now_s) / BUSY_S)
        kept = math.exp((self._updated_s - now_s) / ELSEWHERE_S)
        self._busy_share = keep * self._busy_share + (1.0 - keep) * bool(self._queue.waiting)
        self._came *= kept
        self._waited_s *= kept
        self._updated_s = now_s


def occupancy(
    busy_share: float, running: int, most_running: int, used_blocks: int, blocks: int
) -> float:
    """The use of a replica's scarcest resource, 0 to 1: time for prefill, places in the batch
    (most_running, 0: unknown), or KV blocks."""
    batch = running / most_running if most_running else 0.0
    return max(busy_share, batch, max(0, used_blocks) / max(1, blocks))
