"""How long a newcomer would wait for this engine: arithmetic of what came and what was answered.

The caller passes the time, in seconds of any steady clock.
"""

import math
from dataclasses import dataclass

from replica.speed import Speed

STEP_S = 0.02  # what a first token takes besides its prompt's prefill
MEAN_SHARE = 0.05  # of the latest request in the mean
BUSY_S = 10.0  # over which the busy share is decayed


@dataclass(frozen=True, slots=True)
class _Pending:
    prefill_s: float  # at the speed that the engine claims
    arrived_s: float


class Backlog:
    """The requests that have no first token yet, and how fast those before them got theirs.

    What delays first tokens besides prefill, such as answers that hold all places of the batch,
    makes the engine slow as well: the waiting is the same.
    """

    def __init__(self, prefill_tokens_per_s: float) -> None:
        self._tokens_per_s = prefill_tokens_per_s
        self._pending: dict[str, _Pending] = {}  # by request id, oldest first
        self._speed = Speed()
        self._mean_s = 0.0  # of one request's prefill, as predicted
        self._last_first_token_s = -math.inf
        self._busy_share = 0.0  # as of _looked_s
        self._looked_s = 0.0

    def arrived(self, request_id: str, new_tokens: int, now_s: float) -> None:
        """new_tokens: of its prompt, that are not expected in the KV cache."""
        self._look(now_s)
        prefill_s = STEP_S + new_tokens / self._tokens_per_s
        self._pending[request_id] = _Pending(prefill_s, now_s)
        self._mean_s += (MEAN_SHARE if self._mean_s else 1.0) * (prefill_s - self._mean_s)

    def first_token(self, request_id: str, now_s: float) -> None:
        """Its prefill is over: its time teaches the speed."""
        if request_id not in self._pending:
            return
        self._look(now_s)
        took_s = now_s - self._since_s()
        prefill_s = self._pending.pop(request_id).prefill_s
        self._speed.learn(prefill_s, took_s)
        self._last_first_token_s = now_s

    def gone(self, request_id: str, now_s: float) -> None:
        """Nobody waits for it any more; harmless when it had its first token."""
        self._look(now_s)
        self._pending.pop(request_id, None)

    def wait_s(self, now_s: float) -> float:
        """Until all that is pending has its first token."""
        if not self._pending:
            return 0.0
        head_s, had_s = self._head().prefill_s, now_s - self._since_s()
        speed, slowness = self._speed, self._speed.slowness
        if had_s > slowness * head_s:  # overdue: it is at least as slow as if it came now
            slowness = (speed.observed_s + had_s) / (speed.predicted_s + head_s)
        queued_s = slowness * sum(each.prefill_s for each in self._pending.values())
        return max(0.0, queued_s - min(had_s, slowness * head_s))

    def service_s(self) -> float:
        """The mean time that a request keeps the others waiting."""
        return self._mean_s * self._speed.slowness

    def busy_share(self, now_s: float) -> float:
        """Of the last seconds, in which something was pending."""
        self._look(now_s)
        return self._busy_share

    def _head(self) -> _Pending:
        return next(iter(self._pending.values()))

    def _since_s(self) -> float:
        """When the oldest pending one's turn came."""
        return max(self._head().arrived_s, self._last_first_token_s)

    def _look(self, now_s: float) -> None:
        keep = math.exp((self._looked_s - now_s) / BUSY_S)
        self._busy_share = keep * self._busy_share + (1.0 - keep) * bool(self._pending)
        self._looked_s = now_s


def occupancy(
    busy_share: float, running: int, most_running: int, used_blocks: int, blocks: int
) -> float:
    """How much of a replica is taken, 0 to 1, by whatever is scarcest: its time for prefill, places
    in its batch (most_running, 0: unknown), KV blocks."""
    batch = running / most_running if most_running else 0.0
    return max(busy_share, batch, max(0, used_blocks) / max(1, blocks))
