"""Estimates how long a new request waits for this engine, from arrivals and first tokens.

Batch requests delay no others, so they only count as use of the engine. Autoscaling uses the
estimate. The caller passes the time, in seconds of any monotonic clock.
"""

import math
from dataclasses import dataclass

from kvroute.prefill.prefill_queue import PrefillQueue

STEP_S = 0.02  # seconds that a first token takes in addition to the prefill of its prompt
# Weight of the newest request in the moving average of the predicted prefill times.
NEWEST_WEIGHT = 0.05
BUSY_S = 10.0  # time constant of the busy share: seconds after which a moment weighs 1/e
# Time constant of the mean wait in routers: seconds after which an arrival weighs 1/e. It is short,
# because earlier waits say little about a new request once the routers' queues are empty.
ROUTER_WAIT_S = 3.0


@dataclass(frozen=True, slots=True)
class _Pending:
    prefill_s: float  # seconds of prefill at the speed that the engine claims
    ready_s: float  # time of arrival
    new_tokens: int  # prompt tokens to compute


class Backlog:
    """The requests that have no first token yet, and the engine's speed, learned from first tokens.

    The engine also counts as slow if first tokens are late for other reasons, such as a full batch
    of decoding requests. That is intended: a new request waits just as long.
    """

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._tokens_per_s = prefill_tokens_per_s
        self._queue: PrefillQueue[_Pending] = PrefillQueue()
        self._batch = set[str]()  # batch requests without a first token
        self._mean_s = 0.0  # moving average of one request's predicted prefill time
        self._updated_s = 0.0  # time of the last update of the three decayed values below
        self._busy_share = 0.0  # share of recent time in which a request was pending
        self._arrivals = 0.0  # decayed number of recent requests
        self._waited_s = 0.0  # decayed sum of the times that these requests waited in their routers

    def add(
        self,
        request_id: str,
        new_tokens: int,
        now_s: float,
        waited_s: float = 0.0,
        *,
        is_batch: bool = False,
    ) -> None:
        """Record a request that was sent to this engine.

        Args:
            request_id: The request's id.
            new_tokens: The number of prompt tokens that are not expected in the KV cache.
            now_s: The current time.
            waited_s: Seconds that the request waited in its router's queue.
            is_batch: Whether the request gives way to others.
        """
        self._advance(now_s)
        if is_batch:
            self._batch.add(request_id)
            return
        self._arrivals += 1.0
        self._waited_s += waited_s
        prefill_s = STEP_S + new_tokens / self._tokens_per_s
        self._queue.join(request_id, _Pending(prefill_s, now_s, new_tokens))
        weight = NEWEST_WEIGHT if self._mean_s else 1.0
        self._mean_s += weight * (prefill_s - self._mean_s)

    def first_token(self, request_id: str, now_s: float) -> None:
        """Remove a request that got its first token, and learn the engine's speed from it."""
        self._advance(now_s)
        self._batch.discard(request_id)
        self._queue.finish_prefill(request_id, now_s)

    def remove(self, request_id: str, now_s: float) -> None:
        """Remove a request that ended. This has no effect if it has got its first token."""
        self._advance(now_s)
        self._batch.discard(request_id)
        self._queue.leave(request_id)

    @property
    def pending_tokens(self) -> int:
        """Return the prompt tokens to compute for requests without a first token.

        Batch requests do not count.
        """
        return sum(request.new_tokens for request in self._queue.waiting.values())

    def wait_s(self, now_s: float) -> float:
        """Return the expected wait of a new request, in seconds.

        It is the mean wait of recent requests in their routers, plus the time until all requests
        that are pending at this engine have their first token.
        """
        queue, speed = self._queue, self._queue.speed
        slowness, elapsed_s = speed.slowness, now_s - queue.busy_since_s
        if queue.waiting and elapsed_s > slowness * queue.head_s:
            # The oldest request's first token is overdue. Use the slowness that would be learned
            # if the token arrived now: the engine is at least this slow.
            slowness = speed.slowness_after(queue.head_s, elapsed_s)
        return self._mean_router_wait_s(now_s) + queue.backlog_s(slowness, now_s)

    def service_s(self) -> float:
        """Return the mean prefill time of one request, in seconds."""
        return self._mean_s * self._queue.speed.slowness

    def busy_share(self, now_s: float) -> float:
        """Return the share of recent time in which a request was pending."""
        self._advance(now_s)
        return self._busy_share

    def _mean_router_wait_s(self, now_s: float) -> float:
        """Return the mean wait of recent requests; it decays to 0 when no more requests arrive."""
        self._advance(now_s)
        return self._waited_s / max(1.0, self._arrivals)

    def _advance(self, now_s: float) -> None:
        busy_decay = math.exp((self._updated_s - now_s) / BUSY_S)
        wait_decay = math.exp((self._updated_s - now_s) / ROUTER_WAIT_S)
        is_busy = bool(self._queue.waiting or self._batch)
        self._busy_share = busy_decay * self._busy_share + (1.0 - busy_decay) * is_busy
        self._arrivals *= wait_decay
        self._waited_s *= wait_decay
        self._updated_s = now_s


def occupancy(
    busy_share: float, running: int, max_running: int, used_blocks: int, blocks: int
) -> float:
    """Return the use of a replica's scarcest resource, from 0 to 1.

    Args:
        busy_share: The share of recent time in which a request was pending.
        running: The number of requests in the engine's batch.
        max_running: The maximum number of requests in the batch; 0 if it is unknown.
        used_blocks: The number of KV blocks that requests hold.
        blocks: The number of KV blocks of the engine.
    """
    batch = running / max_running if max_running else 0.0
    return max(busy_share, batch, max(0, used_blocks) / max(1, blocks))
