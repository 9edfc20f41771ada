"""Where a request should run, as arithmetic: no clocks, no sockets, no Ray.

    cost = W + alpha * w + churn + decode                          all in seconds

    W       prefill queued or running on the replica
    w       prefill that this request still needs there, given its hits
    alpha   1 while a quarter of the fleet is idle; then the price of congestion: recomputing a
            prefix delays everybody behind it, so it rises with the lower quartile of the W
    churn   a little more where much was computed lately, a little less where there is room
    decode  what joining this replica's decode batch costs the requests in it

A minimum of W + w alone would recompute a long prefix on an idle replica to save this request a
little, and charge the work to everybody else.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

SCARCITY_S = 0.1  # backlog of the lower quartile from which recomputing has a price
PRICE_PER_S = 16.0  # how fast the price rises with that backlog
MAX_PRICE = 40.0
CHURN = 0.1  # the most that recent work adds to or takes from w, as a share of it
DECODE_STEPS = 11.0  # decode steps that a newcomer's batch mates feel, besides its prefill's
PREFILL_CHUNK_TOKENS = 8192  # prompt tokens that share one step with the decodes


@dataclass(frozen=True, slots=True)
class Candidate:
    replica_id: str
    hit_blocks: int  # leading blocks of the prompt held or expected there
    backlog_s: float  # W
    prefill_s: float  # w
    pending_tokens: int = 0  # uncached prompt tokens sent there that have no first token yet
    new_tokens: int = 0  # prompt tokens this request would have to compute there
    recent_share: float = 1.0  # tokens computed there lately, over the fleet's mean; 1 is average
    decode_step_s: float = 0.0  # length that the replica's decodes add to each step
    free_blocks: int = 0  # KV blocks that no running request holds


def price(backlogs_s: Sequence[float]) -> float:
    """alpha: what a second of prefill costs the fleet, in seconds."""
    scarcity_s = sorted(backlogs_s)[len(backlogs_s) // 4]
    return 1.0 + min(MAX_PRICE, PRICE_PER_S * max(0.0, scarcity_s - SCARCITY_S))


def cost_s(candidate: Candidate, alpha: float) -> float:
    churn_s = CHURN * candidate.prefill_s * min(2.0, candidate.recent_share - 1.0)
    steps = DECODE_STEPS + (
        (candidate.pending_tokens + candidate.new_tokens) / PREFILL_CHUNK_TOKENS
    )
    return (
        candidate.backlog_s
        + alpha * candidate.prefill_s
        + churn_s
        + candidate.decode_step_s * steps
    )


def rank(candidates: Sequence[Candidate], *, rng: random.Random) -> list[Candidate]:
    """Cheapest first; at equal cost the most free KV, then chance, never position."""
    if not candidates:
        return []
    alpha = price([candidate.backlog_s for candidate in candidates])
    return sorted(candidates, key=lambda c: (cost_s(c, alpha), -c.free_blocks, rng.random()))
