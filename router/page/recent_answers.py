"""How many of a router's requests got their first token lately, and how fast answers come."""

import statistics
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from kvroute.router.page.rolling_window import WINDOW_S
from kvroute.router.placement.attempts import Attempt, RequestObserver

# Times in memory. If WINDOW_S has more requests, only the latest ones are kept, and the reported
# window is shorter.
KEPT = 4096


class RecentAnswers(RequestObserver):
    """The times of the answers of the last WINDOW_S seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._started_s = clock()
        # Time of the event; seconds to the first token.
        self._first_tokens = deque[tuple[float, float]](maxlen=KEPT)
        # Time of an answer's end; its mean seconds between two tokens.
        self._gaps = deque[tuple[float, float]](maxlen=KEPT)

    def first_token(self, attempt: Attempt) -> None:
        if attempt.first_token_s is not None and not attempt.context.is_resumed:
            self.add(attempt.first_token_s - attempt.context.ready_s)

    def ended(self, attempt: Attempt) -> None:
        if (gap_s := attempt.token_gap_s) is not None:
            self._gaps.append((self._clock(), gap_s))

    def add(self, ttft_s: float) -> None:
        """Add a request whose first token has just come."""
        self._first_tokens.append((self._clock(), ttft_s))

    def as_json(self) -> dict[str, Any]:
        """Return the rate of requests, and quantiles of the times of their answers (None: none)."""
        now_s = self._clock()
        begin_s = max(self._started_s, now_s - WINDOW_S)
        ttfts_s, gaps_s = (_since(begin_s, times) for times in (self._first_tokens, self._gaps))
        if len(ttfts_s) == KEPT:
            begin_s = self._first_tokens[0][0]
        return {
            "window_s": round(now_s - begin_s, 1),
            "requests": len(ttfts_s),
            "requests_per_s": round(len(ttfts_s) / max(1.0, now_s - begin_s), 3),
            "ttft_p50_s": _quantile(ttfts_s, 50),
            "ttft_p90_s": _quantile(ttfts_s, 90),
            "tpot_p50_s": _quantile(gaps_s, 50),
            "tpot_p90_s": _quantile(gaps_s, 90),
        }


def _since(begin_s: float, times: deque[tuple[float, float]]) -> list[float]:
    """Drop the times before `begin_s`, and return the others."""
    while times and times[0][0] < begin_s:
        times.popleft()
    return [seconds for _, seconds in times]


def _quantile(times_s: list[float], percent: int) -> float | None:
    if len(times_s) < 2:
        return round(times_s[0], 4) if times_s else None
    return round(statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1], 4)
