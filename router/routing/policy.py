"""Ranks replicas for a request by cost, as arithmetic only: no clocks, no sockets, no Ray.

    cost = W + reload + alpha * (own + copy / (1 + forks) + lora) + eviction + externality
             + balance + rotation + decode

in seconds, with

    W        prefill queued or running on the replica
    reload   copying back what the replica has of the prompt in host memory, those copies included
             that are under way there. It delays this request alone and takes no time of the GPU's
    own      prefill of what no replica holds: every replica would have to compute it
    copy     prefill of what another replica holds and this one does not
    forks    earlier requests that diverged at the end of the prompt's longest known prefix. A
             prefix where many diverge, like a system prompt, is worth a second copy. A chat's
             history, where only its own next turn continues, is not. Matters in an idle fleet only
    lora     loading the request's LoRA adapter, if it is not loaded; the engine waits meanwhile
    alpha    1 while a quarter of the fleet is idle, otherwise the price of congestion: recomputing
             a prefix delays all requests behind it, so it rises with the lower quartile of the W
    eviction what a copy pushes out of the cache there, as far as it is asked for again: copy times
             the pressure (pressure.py). Tight caches also have less of copies and of rotation
    externality  the wait that this request causes for new requests. They go to the emptier half of
             the fleet, so work counts there, up to the median M of the W, for as long as it takes
             to drain: (min(W + work, M)^2 - min(W, M)^2) / 2 for each new request a second. So long
             prompts queue behind long prompts, and short ones find a replica without them
    balance  a little more where much was computed recently, a little less where little was
    rotation in an idle fleet new conversations rotate, since their own later turns will follow
    decode   what joining this replica's decode batch costs the requests in it

A minimum of W + own + copy alone would recompute a long prefix on an idle replica to save this
request a little time, at the expense of all other requests.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

PRICE_PER_S = 16.0  # rise of the price of congestion for each second of lower-quartile backlog
MAX_PRICE = 40.0
NEW_REQUESTS_PER_S = 1.0  # that come to the emptier half while a backlog drains
BALANCE = 0.1  # what twice the mean of recent work adds, in prefills of what is new
ROTATION = 1.25  # what twice the mean of new conversations adds, in prefills of what is new
IDLE_POWER = 16  # rotation and copies fade as replicas get busy: the idle share to this power
MAX_FORKS = 4  # a copy costs at least a fifth, so questions about a long document stay with it
DECODE_STEPS = 11.0  # decode steps in which a new request slows its batch, plus its prefill chunks
PREFILL_CHUNK_TOKENS = 8192  # prompt tokens that share one step with the decodes


class Candidate(NamedTuple):
    """One replica for one request. A tuple, since every decision makes one for each replica."""

    replica_id: str
    hit_blocks: int  # leading blocks of the prompt held or expected there, in whatever memory
    backlog_s: float  # W
    own_s: float
    copy_s: float = 0.0
    pending_tokens: int = 0  # uncached prompt tokens sent there that have no first token yet
    new_tokens: int = 0  # prompt tokens this request would have to compute there
    recent_share: float = 1.0  # tokens computed there recently, over the fleet's mean
    branch_share: float = 1.0  # branches of the prompt's known prefix there, over the mean
    decode_step_s: float = 0.0  # time that the replica's decodes add to each step
    free_blocks: int = 0  # KV blocks that no running request holds
    unanswered: int = 0  # requests sent there and not yet answered
    lora_s: float = 0.0  # to load the request's LoRA adapter there; 0: nothing to load
    host_blocks: int = 0  # of hit_blocks, the last ones: those that have to be reloaded
    reload_s: float = 0.0  # until they are

    @property
    def ttft_s(self) -> float:
        """To the first token of this request, as far as is known."""
        return self.backlog_s + self.reload_s + self.own_s + self.copy_s + self.lora_s


@dataclass(frozen=True, slots=True)
class Prices:
    """What all candidates of one request have in common."""

    alpha: float
    median_backlog_s: float  # new requests avoid replicas that have more
    copy: float  # the share of a known prefix's prefill that counts
    branch: float  # weight of one share of the prefix's branches, in prefills of what is new
    pressure: float  # prefills to come for each prefill of a copy


def is_branch(candidates: Sequence[Candidate], forks: float) -> bool:
    """Whether the prompt begins a conversation: no replica has its start, or others diverged."""
    return forks > 0 or not any(candidate.hit_blocks for candidate in candidates)


def prices(candidates: Sequence[Candidate], forks: float, pressure: float = 0.0) -> Prices:
    backlogs_s = sorted(candidate.backlog_s for candidate in candidates)
    count = len(backlogs_s)
    idle = (backlogs_s.count(0.0) / count) ** IDLE_POWER
    spread = idle * max(0.0, 1.0 - pressure)
    return Prices(
        alpha=1.0 + min(MAX_PRICE, PRICE_PER_S * backlogs_s[count // 4]),
        median_backlog_s=backlogs_s[count // 2],
        copy=1.0 / (1.0 + spread * min(MAX_FORKS, forks)),
        branch=spread * ROTATION if is_branch(candidates, forks) else 0.0,
        pressure=pressure,
    )


def cost_s(candidate: Candidate, prices: Prices) -> float:
    """The terms of the formula above, in its order."""
    backlog_s, own_s, copy_s = candidate.backlog_s, candidate.own_s, candidate.copy_s
    lora_s = candidate.lora_s
    total_s = backlog_s + prices.alpha * (own_s + prices.copy * copy_s + lora_s)
    total_s += candidate.reload_s + prices.pressure * copy_s
    if backlog_s < prices.median_backlog_s:
        after_s = min(backlog_s + own_s + copy_s + lora_s, prices.median_backlog_s)
        total_s += NEW_REQUESTS_PER_S * (after_s**2 - backlog_s**2) / 2.0
    total_s += BALANCE * own_s * min(2.0, candidate.recent_share - 1.0)
    if prices.branch:
        total_s += prices.branch * own_s * min(2.0, candidate.branch_share - 1.0)
    chunks = (candidate.pending_tokens + candidate.new_tokens) / PREFILL_CHUNK_TOKENS
    return total_s + candidate.decode_step_s * (DECODE_STEPS + chunks)


class Terms(NamedTuple):
    """What `cost_s` adds up, in the order of the formula above: seconds, as they are priced."""

    waiting: float
    reload: float
    own: float
    copy: float
    lora: float
    eviction: float
    externality: float
    balance: float
    rotation: float
    decode: float


def terms_s(candidate: Candidate, prices: Prices) -> Terms:
    """The terms of `cost_s`, to explain a decision. A decision over 64 replicas takes half the time
    when `cost_s` adds them up directly; tests/unit/test_policy.py checks that the sum is equal."""
    backlog_s, own_s, copy_s = candidate.backlog_s, candidate.own_s, candidate.copy_s
    after_s = min(backlog_s + own_s + copy_s + candidate.lora_s, prices.median_backlog_s)
    is_joined = backlog_s < prices.median_backlog_s
    chunks = (candidate.pending_tokens + candidate.new_tokens) / PREFILL_CHUNK_TOKENS
    return Terms(
        waiting=backlog_s,
        reload=candidate.reload_s,
        own=prices.alpha * own_s,
        copy=prices.alpha * prices.copy * copy_s,
        lora=prices.alpha * candidate.lora_s,
        eviction=prices.pressure * copy_s,
        externality=NEW_REQUESTS_PER_S * (after_s**2 - backlog_s**2) / 2.0 if is_joined else 0.0,
        balance=BALANCE * own_s * min(2.0, candidate.recent_share - 1.0),
        rotation=prices.branch * own_s * min(2.0, candidate.branch_share - 1.0),
        decode=candidate.decode_step_s * (DECODE_STEPS + chunks),
    )


def rank(
    candidates: Sequence[Candidate], *, forks: float, rng: random.Random, pressure: float = 0.0
) -> list[Candidate]:
    """Cheapest first; at equal cost the most free KV blocks first, then random order."""
    if not candidates:
        return []
    common = prices(candidates, forks, pressure)
    draw = rng.random
    ranked = sorted([(cost_s(c, common), -c.free_blocks, draw(), c) for c in candidates])
    return [each[-1] for each in ranked]
