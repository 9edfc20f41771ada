"""The last decisions of a router: where requests went, what became of them, and why."""

import time
from collections import deque
from dataclasses import dataclass, field

import msgspec

from kvroute.blocks.tiers import PEER, SLOWER
from kvroute.router.placement.attempts import Attempt, RequestObserver
from kvroute.router.placement.receipts import receipt

DECISIONS = 50  # decisions in memory
RECEIPT_REPLICAS = 8  # best-ranked replicas that a receipt shows

encode = msgspec.json.Encoder().encode


@dataclass(slots=True)
class Decision:
    """A request that was sent to a replica, with cached JSON for the live page."""

    number: int  # 1 for the first request that this router sent
    at_s: float  # time of sending, in seconds since 1970
    attempt: Attempt
    # JSON that explains the placement (placement/receipts.py); None until a page is open.
    receipt: msgspec.Raw | None = field(default=None, repr=False)
    summary: bytes = b""  # JSON of the decision; empty until the request has ended


class Decisions(RequestObserver):
    """Keeps the last DECISIONS in memory, which takes a few microseconds for each request."""

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS)  # oldest first
        self.in_flight = 0  # requests sent and not ended
        self._sent = 0

    def sent(self, attempt: Attempt) -> None:
        self.in_flight += 1
        self._sent += 1
        self.decisions.append(Decision(self._sent, time.time(), attempt))

    def ended(self, attempt: Attempt) -> None:
        self.in_flight -= 1

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

    def encoded(self, decision: Decision, policy: str) -> bytes:
        """Return a decision as JSON, with a receipt under this routing policy."""
        if decision.summary:
            return decision.summary
        attempt, continued = decision.attempt, self.continued(decision)
        assert attempt.placement is not None, "only this router's own attempts have observers"
        if decision.receipt is None:
            explained = receipt(
                attempt.placement,
                policy=policy,
                broken=attempt.context.broken,
                evicted_why=attempt.context.evicted_why,
                is_batch=attempt.context.is_in_lane,
                limit=RECEIPT_REPLICAS,
            )
            decision.receipt = msgspec.Raw(encode(explained))
        waited_s = None if attempt.first_token_s is None else attempt.first_token_s - attempt.sent_s
        ledger, reloaded = attempt.ledger(), attempt.reloaded_tokens
        summary = encode(
            {
                "number": decision.number,
                "at_ms": round(1000 * decision.at_s),
                "replica": attempt.replica_id,
                "of_replicas": len(attempt.placement.ranking),
                "prompt_tokens": attempt.placement.prompt_tokens,
                "expected_tokens": attempt.placement.expected_tokens(attempt.replica_id),
                "cached_tokens": attempt.cached_tokens,
                **{f"{tier.name}_tokens": reloaded.get(tier, 0) for tier in (*SLOWER, PEER)},
                "output_tokens": attempt.output_tokens if attempt.outcome else None,
                "predicted_ttft_s": round(
                    attempt.placement.predicted_ttft_s(attempt.replica_id), 4
                ),
                "ttft_s": None if waited_s is None else round(waited_s, 4),
                "queued_s": round(attempt.context.wait.waited_s, 4),
                "outcome": attempt.outcome,
                "is_resumed": attempt.context.is_resumed,
                # If the replica was lost: where the request was sent then, and how that ended.
                "continued_at": continued and continued.attempt.replica_id,
                "continued_outcome": continued and continued.attempt.outcome,
                "ledger": ledger and msgspec.structs.asdict(ledger),
                "evicted_why": attempt.context.evicted_why if ledger and ledger.evicted else None,
                "receipt": decision.receipt,
            }
        )
        # A lost replica's decision still changes while another replica continues the answer.
        if attempt.outcome and (attempt.outcome != "failed" or _has_ended(continued)):
            decision.summary = summary
        return summary


def _has_ended(continued: Decision | None) -> bool:
    """Return whether the answer that this decision continues can no longer be lost or go on."""
    return continued is not None and continued.attempt.outcome not in (None, "failed")
