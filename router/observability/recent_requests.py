"""A router's requests of the last five minutes: prompt tokens by cause, and times of answers.

`kvroute status` and the doctor show them. placement/ledger.py explains the causes.
"""

import statistics
import time
from collections import deque
from collections.abc import Callable, Collection
from operator import add, sub
from typing import Any

import msgspec

from kvroute.contract.keep import EVICTION_REASONS
from kvroute.router.observability.rolling_window import WINDOW_S, RollingWindow
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.placement.ledger import CAUSES, Ledger

# Times in memory. If WINDOW_S has more requests, only the latest ones are kept, and the reported
# window is shorter.
KEPT = 4096


class Sums(msgspec.Struct, frozen=True):
    """The sums over the prompts of some requests."""

    requests: int  # answered requests; a replica that was lost during an answer has not answered
    tokens: Ledger
    # Tokens of the cause `evicted` by reason, in the order of EVICTION_REASONS.
    evicted: tuple[int, ...]

    @property
    def hit_tokens(self) -> int:
        return self.tokens.cached

    @property
    def prompt_tokens(self) -> int:
        return sum(msgspec.structs.astuple(self.tokens))


class RecentTokens(RequestObserver):
    """Sums over the last WINDOW_S by replica. Replicas without requests in that time are absent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # By replica: answered requests, tokens by cause, evicted tokens by reason.
        self._window = RollingWindow[dict[str, list[int]]](clock, dict, self._subtract)
        self._totals: dict[str, list[int]] = {}  # the sums of all parts of the window

    def ended(self, attempt: Attempt) -> None:
        if (ledger := attempt.ledger()) is not None:
            is_answered = attempt.outcome != "failed"
            self.add(
                attempt.replica_id, ledger, attempt.context.evicted_why, is_answered=is_answered
            )

    def add(
        self,
        replica_id: str,
        ledger: Ledger,
        evicted_why: str = "usual",
        *,
        is_answered: bool = True,
    ) -> None:
        """Add a request that ended at the replica.

        Args:
            replica_id: the replica.
            ledger: the prompt tokens by cause.
            evicted_why: the reason for the evictions that the ledger counts.
            is_answered: False if the replica was lost during the answer. If another replica
                continues it, the request is counted there.
        """
        evicted = (ledger.evicted * (why == evicted_why) for why in EVICTION_REASONS)
        counts = (int(is_answered), *msgspec.structs.astuple(ledger), *evicted)
        for sums in (self._window.current(), self._totals):
            sums[replica_id] = list(map(add, sums.get(replica_id) or NOTHING, counts))

    def sums(self) -> dict[str, Sums]:
        self._window.parts()  # drops the parts that are too old
        return {replica_id: _sums(*counts) for replica_id, counts in self._totals.items()}

    def _subtract(self, part: dict[str, list[int]]) -> None:
        for replica_id, counts in part.items():
            rest = list(map(sub, self._totals[replica_id], counts))
            if any(rest):
                self._totals[replica_id] = rest
            else:
                del self._totals[replica_id]


def _sums(requests: int, *tokens: int) -> Sums:
    return Sums(requests, Ledger(*tokens[: len(CAUSES)]), tokens[len(CAUSES) :])


def summed(sums: Collection[Sums]) -> dict[str, Any]:
    """Return the total of the replicas' sums, as JSON."""
    ledgers = [replica.tokens for replica in sums]
    return {
        "window_s": WINDOW_S,
        "requests": sum(replica.requests for replica in sums),
        "tokens": {cause: sum(getattr(ledger, cause) for ledger in ledgers) for cause in CAUSES},
        "evicted": {
            why: sum(replica.evicted[i] for replica in sums)
            for i, why in enumerate(EVICTION_REASONS)
        },
    }


NOTHING = (0,) * (1 + len(CAUSES) + len(EVICTION_REASONS))


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
            "ttft_p50_s": quantile(ttfts_s, 50),
            "ttft_p90_s": quantile(ttfts_s, 90),
            "tpot_p50_s": quantile(gaps_s, 50),
            "tpot_p90_s": quantile(gaps_s, 90),
        }


def _since(begin_s: float, times: deque[tuple[float, float]]) -> list[float]:
    """Drop the times before `begin_s`, and return the others."""
    while times and times[0][0] < begin_s:
        times.popleft()
    return [seconds for _, seconds in times]


def quantile(times_s: list[float], percent: int) -> float | None:
    """Return the time that this percentage of the times does not exceed; None: there is none."""
    if len(times_s) < 2:
        return round(times_s[0], 4) if times_s else None
    return round(statistics.quantiles(times_s, n=100, method="inclusive")[percent - 1], 4)
