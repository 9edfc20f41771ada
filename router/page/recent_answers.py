"""How many of a router's requests got their first token lately, and how fast."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvroute.router.page.rolling_window import WINDOW_S
from kvroute.router.placement.attempts import Attempt, RequestObserver

# Times to first token in memory. If WINDOW_S has more requests, only the latest ones are kept, and
# the reported window is shorter.
KEPT = 4096


class RecentAnswers(RequestObserver):
    """The times to first token of the last WINDOW_S seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        self._times = deque[tuple[float, float]](maxlen=KEPT)  # time; seconds to the first token

    def first_token(self, attempt: Attempt) -> None:
        if attempt.first_token_s is not None and not attempt.context.is_resumed:
            self.add(attempt.first_token_s - attempt.context.ready_s)

    def add(self, ttft_s: float) -> None:
        """Add a request whose first token has just come."""
        self._times.append((self._clock(), ttft_s))

    def as_json(self) -> dict[str, Any]:
        """Return the rate of requests, and quantiles of the time to first token (None: none)."""
        now_s = self._clock()
        while self._times and self._times[0][0] < now_s - WINDOW_S:
            self._times.popleft()
        begin_s = max(self._started_s, now_s - WINDOW_S)
        if len(self._times) == KEPT:
            begin_s = self._times[0][0]
        times_s = [ttft_s for _, ttft_s in self._times]
        return {
            "window_s": round(now_s - begin_s, 1),
            "requests": len(times_s),
            "requests_per_s": round(len(times_s) / max(1.0, now_s - begin_s), 3),
            "ttft_p50_s": _quantile(times_s, 50),
            "ttft_p90_s": _quantile(times_s, 90),
        }


def _quantile(times_s: list[float], percent: int) -> float | None:
    if len(times_s) < 2:
        return round(times_s[0], 4) if times_s else None
    return round(statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1], 4)
