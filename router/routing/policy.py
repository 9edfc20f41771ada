"""Where a request should run, as arithmetic: no clocks, no sockets, no Ray.

    cost = W + alpha * (own + copy / (1 + forks) + lora) + crowd + balance + turn + decode

in seconds, with

    W        prefill queued or running on the replica
    own      prefill of what no replica holds: it has to be done wherever the request goes
    copy     prefill of what another replica holds and this one does not
    forks    requests that left the prompt's longest known prefix before this one: a prefix that
             many leave from, like a system prompt, is worth a second copy; a chat's history, which
             only its own next turn leaves from, is not. Counts in an idle fleet alone
    lora     loading the request's LoRA adapter, where it is not; the engine does nothing else then
    alpha    1 while a quarter of the fleet is idle; then the price of congestion: recomputing a
             prefix delays everybody behind it, so it rises with the lower quartile of the W
    crowd    what newcomers will wait for this request. They go to the emptier half of the fleet, so
             work counts there, up to the median M of the W, for as long as it takes to drain:
             (min(W + work, M)^2 - min(W, M)^2) / 2 for each newcomer a second. Long prompts thus
             queue behind long prompts, and short ones find a replica free of them
    balance  a little more where much was computed lately, a little less where little was
    turn     in an idle fleet new conversations take turns, since their own later turns will follow
    decode   what joining this replica's decode batch costs the requests in it

A minimum of W + own + copy alone would recompute a long prefix on an idle replica to save this
request a little, and charge the work to everybody else.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PRICE_PER_S = 16.0  # how fast the price of congestion rises with the lower quartile's backlog
MAX_PRICE = 40.0
NEWCOMERS_PER_S = 1.0  # who come to the emptier half while a backlog drains
BALANCE = 0.1  # what twice the mean of recent work adds, in prefills of what is new
BRANCH_TURNS = 1.25  # what twice the mean of new conversations adds, in prefills of what is new
CALM = 16  # how fast turns and copies fade as replicas get busy: the idle share to this power
MAX_FORKS = 4  # a copy costs at least a fifth: questions about a long document stay with it
DECODE_STEPS = 11.0  # decode steps that a newcomer's batch mates feel, besides its prefill's
PREFILL_CHUNK_TOKENS = 8192  # prompt tokens that share one step with the decodes


class Candidate(NamedTuple):
    """A replica and one request. Made for each replica at every decision, hence a cheap tuple."""

    replica_id: str
    hit_blocks: int  # leading blocks of the prompt held or expected there
    backlog_s: float  # W
    own_s: float
    copy_s: float = 0.0
    pending_tokens: int = 0  # uncached prompt tokens sent there that have no first token yet
    new_tokens: int = 0  # prompt tokens this request would have to compute there
    recent_share: float = 1.0  # tokens computed there lately, over the fleet's mean
    branch_share: float = 1.0  # branches it took of the prompt's known prefix, over the mean
    decode_step_s: float = 0.0  # time that the replica's decodes add to each step
    free_blocks: int = 0  # KV blocks that no running request holds
    unanswered: int = 0  # requests sent there and not yet answered
    lora_s: float = 0.0  # to load the request's LoRA adapter there; 0: there is nothing to load


@dataclass(frozen=True, slots=True)
class Prices:
    """What all candidates of one request have in common."""

    alpha: float
    crowded_s: float  # the median backlog: newcomers avoid replicas that have more
    copy: float  # the share that counts of what recomputing a known prefix costs
    branch: float  # prefills of what is new that one share of the prefix's branches is worth


def is_branch(candidates: Sequence[Candidate], forks: float) -> bool:
    """Whether the prompt begins a conversation: nobody knows its start, or others left it there."""
    return forks > 0 or not any(candidate.hit_blocks for candidate in candidates)


def prices(candidates: Sequence[Candidate], forks: float) -> Prices:
    backlogs_s = sorted(candidate.backlog_s for candidate in candidates)
    count = len(backlogs_s)
    calm = (backlogs_s.count(0.0) / count) ** CALM
    return Prices(
        alpha=1.0 + min(MAX_PRICE, PRICE_PER_S * backlogs_s[count // 4]),
        crowded_s=backlogs_s[count // 2],
        copy=1.0 / (1.0 + calm * min(MAX_FORKS, forks)),
        branch=calm * BRANCH_TURNS if is_branch(candidates, forks) else 0.0,
    )


def cost_s(candidate: Candidate, prices: Prices) -> float:
    """The terms of the formula above, in its order."""
    backlog_s, own_s, copy_s = candidate.backlog_s, candidate.own_s, candidate.copy_s
    lora_s = candidate.lora_s
    total_s = backlog_s + prices.alpha * (own_s + prices.copy * copy_s + lora_s)
    if backlog_s < prices.crowded_s:
        after_s = min(backlog_s + own_s + copy_s + lora_s, prices.crowded_s)
        total_s += NEWCOMERS_PER_S * (after_s**2 - backlog_s**2) / 2.0
    total_s += BALANCE * own_s * min(2.0, candidate.recent_share - 1.0)
    if prices.branch:
        total_s += prices.branch * own_s * min(2.0, candidate.branch_share - 1.0)
    chunks = (candidate.pending_tokens + candidate.new_tokens) / PREFILL_CHUNK_TOKENS
    return total_s + candidate.decode_step_s * (DECODE_STEPS + chunks)


class Terms(NamedTuple):
    """What `cost_s` adds up, in the order of the formula above: seconds, as they are priced."""

    waiting: float
    own: float
    copy: float
    lora: float
    crowd: float
    balance: float
    turn: float
    decode: float


def terms_s(candidate: Candidate, prices: Prices) -> Terms:
    """For those who ask why. A decision, which asks 64 replicas at once, takes half the time to
    add them up on the way; tests/test_policy.py holds that the sum is the same."""
    backlog_s, own_s, copy_s = candidate.backlog_s, candidate.own_s, candidate.copy_s
    after_s = min(backlog_s + own_s + copy_s + candidate.lora_s, prices.crowded_s)
    is_joined = backlog_s < prices.crowded_s
    chunks = (candidate.pending_tokens + candidate.new_tokens) / PREFILL_CHUNK_TOKENS
    return Terms(
        waiting=backlog_s,
        own=prices.alpha * own_s,
        copy=prices.alpha * prices.copy * copy_s,
        lora=prices.alpha * candidate.lora_s,
        crowd=NEWCOMERS_PER_S * (after_s**2 - backlog_s**2) / 2.0 if is_joined else 0.0,
        balance=BALANCE * own_s * min(2.0, candidate.recent_share - 1.0),
        turn=prices.branch * own_s * min(2.0, candidate.branch_share - 1.0),
        decode=candidate.decode_step_s * (DECODE_STEPS + chunks),
    )


def rank(candidates: Sequence[Candidate], *, forks: float, rng: random.Random) -> list[Candidate]:
    """Cheapest first; at equal cost the most free KV, then chance, never position."""
    if not candidates:
        return []
    common = prices(candidates, forks)
    return sorted(candidates, key=lambda c: (cost_s(c, common), -c.free_blocks, rng.random()))
