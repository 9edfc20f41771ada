"""The router's last decisions, and the prompt tokens of the last five minutes by cause.

placement/ledger.py explains the causes.
"""

import time
from collections import deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from operator import add, sub
from typing import Any

import msgspec

from kvroute.router.page.rolling_window import WINDOW_S, RollingWindow
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.placement.ledger import CAUSES, Ledger
from kvroute.router.sessions.returns import EVICTION_REASONS, EvictionReason

DECISIONS = 50  # decisions in memory


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


class RecentTokens:
    """Sums over the last WINDOW_S by replica. Replicas without requests in that time are absent."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        # By replica: answered requests, tokens by cause, evicted tokens by reason.
        self._window = RollingWindow[dict[str, list[int]]](clock, dict, self._subtract)
        self._totals: dict[str, list[int]] = {}  # the sums of all parts of the window

    def add(
        self,
        replica_id: str,
        ledger: Ledger,
        evicted_why: EvictionReason = "usual",
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


@dataclass(slots=True)
class Decision:
    """A request that was sent to a replica, with cached JSON for the live page."""

    number: int  # 1 for the first request that this router sent
    at_s: float  # time of sending, in seconds since 1970
    attempt: Attempt
    # JSON that explains the placement (placement/receipts.py); None until a page is open.
    receipt: msgspec.Raw | None = field(default=None, repr=False)
    summary: bytes = b""  # JSON of the decision; empty until the request has ended


class Recent(RequestObserver):
    """Keeps the last DECISIONS in memory, which takes a few microseconds for each request."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)  # oldest first
        self.in_flight = 0  # requests sent and not ended
        self.window = RecentTokens(clock)
        self._sent = 0

    def sent(self, attempt: Attempt) -> None:
        self.in_flight += 1
        self._sent += 1
        self.decisions.append(Decision(self._sent, time.time(), attempt))

    def ended(self, attempt: Attempt) -> None:
        self.in_flight -= 1
        if (ledger := attempt.ledger()) is not None:
            self.window.add(
                attempt.replica_id,
                ledger,
                attempt.evicted_why,
                is_answered=attempt.outcome != "failed",
            )

    def continued(self, decision: Decision) -> Decision | None:
        """Return the latest decision that sent the request again, after its replica was lost.

        The result is None if the replica was not lost, or the request was not sent again.
        """
        if decision.attempt.outcome != "failed":
            return None
        request_id = decision.attempt.request_id
        again = (
            later
            for later in reversed(self.decisions)
            if later.number > decision.number
            and later.attempt.request_id == request_id
            and later.attempt.outcome != "moved"
        )
        return next(again, None)
