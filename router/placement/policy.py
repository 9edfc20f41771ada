"""Ranks replicas for a request by cost, as arithmetic only: no clocks, no sockets, no Ray.

    cost = waiting + reload + memory + own + copy + lora
           + worth * ((alpha - 1) * (own + copy + lora) + COPY_PRICE * copy)
           + rotation + decode

(copy is less than that for the common prefix of many conversations in an idle fleet, see below)

in seconds, with

    waiting  prefill queued or running on the replica
    reload   copying back what the replica has of the prompt in slower tiers, after the copies that
             are under way there. It delays this request alone and takes no time of the GPU
    memory   until answers that run there have ended and left room for the prompt in the KV cache
    own      prefill of what no replica holds: every replica would have to compute it
    copy     prefill of what another replica holds and this one does not. Besides alpha it costs
             COPY_PRICE, however idle the fleet is: it takes time of a GPU that others could use,
             and its blocks push out others
    lora     loading the request's LoRA adapter, if it is not loaded; the engine waits meanwhile
    alpha    1 while a quarter of the fleet is idle, otherwise the price of congestion: recomputing
             a prefix delays all requests behind it, so it rises with the lower quartile of the
             waiting times
    worth    1; on a replica that a fault makes slow, the time that a healthy one takes, over the
             time that this one takes: others lose less by its time
    rotation in an idle fleet, new conversations rotate over the replicas, since their own later
             turns will follow them. A prompt begins a conversation if no replica has its start, or
             if others diverged from it there (it forks). Their common prefix, such as a system
             prompt, is then copied at nobody's expense, and its copy will serve as many further
             conversations: its cost is divided by the number of forks and one. All of this fades
             as replicas get busy and caches get tight
    decode   what joining this replica's decode batch costs the requests in it

A minimum of waiting + own + copy alone would recompute a long prefix on an idle replica to save
this request a little time, at the expense of all other requests.

No constant here has a unit. Times are relative to the fleet's own (scale.py), so engines that are k
times slower, under requests that come k times slower, get the same decisions.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvroute.blocks.tiers import TierBlocks

PRICE = 35.0  # rise of the price of congestion, for a lower quartile of one Scale.busy_s
MAX_PRICE = 40.0
COPY_PRICE = 2.5  # surcharge for a second copy of cached blocks, in prefill times of the copy
ROTATION = 1.25  # cost of twice the mean of new conversations, in prefill times of the new part
IDLE_POWER = 16  # rotation fades as replicas get busy: the idle share to this power
DECODE_STEPS = 11.0  # decode steps in which a new request slows its batch, plus its prefill steps


class Candidate(NamedTuple):
    """One replica for one request. A tuple, since every decision makes one for each replica."""

    replica_id: str
    hit_blocks: int  # leading blocks of the prompt held or expected there, in whatever memory
    backlog_s: float  # W
    own_s: float
    copy_s: float = 0.0
    steps: float = 0.0  # engine steps to compute all prompts that wait there, and this one
    decode_step_s: float = 0.0  # time that the replica's decodes add to each step
    free_blocks: int = 0  # KV blocks that no running request holds
    unanswered: int = 0  # requests sent there and not yet answered
    memory_s: float = 0.0  # seconds until the KV cache has room for the prompt
    lora_s: float = 0.0  # seconds to load the request's LoRA adapter; 0: nothing to load
    reloads: tuple[TierBlocks, ...] = ()  # the last of hit_blocks, in slower tiers than the GPU
    reload_s: float = 0.0  # seconds until the reloaded blocks are in GPU memory
    worth: float = 1.0  # seconds of a healthy replica that one second here is worth to others
    branch_share: float = 1.0  # conversations that began there with this prefix, over the mean

    @property
    def gpu_blocks(self) -> int:
        """Return the leading blocks held or expected in GPU memory."""
        return self.hit_blocks - sum([part.blocks for part in self.reloads])

    @property
    def ttft_s(self) -> float:
        """Return the time to the first token of this request, as far as it is known."""
        waits_s = self.backlog_s + self.reload_s + self.memory_s
        return waits_s + self.own_s + self.copy_s + self.lora_s


@dataclass(frozen=True, slots=True)
class Prices:
    """What all candidates of one request have in common."""

    alpha: float
    rotation: float  # weight of one share of new conversations, in prefills of what is new
    copy: float = COPY_PRICE  # surcharge of a copy, in prefills of it
    copy_uses: float = 1.0  # conversations among which the cost of a copy is divided


def prices(
    candidates: Sequence[Candidate],
    *,
    busy_s: float,
    pressure: float = 0.0,
    forks: float = 1.0,
) -> Prices:
    """Return the prices of the moment.

    Args:
        busy_s: of the fleet's Scale.
        forks: earlier prompts that diverged where the known part of this one ends.
    """
    backlogs_s = sorted([candidate.backlog_s for candidate in candidates])
    count = len(backlogs_s)
    begins = forks > 0 or not any(candidate.hit_blocks for candidate in candidates)
    spread = (backlogs_s.count(0.0) / count) ** IDLE_POWER * max(0.0, 1.0 - pressure)
    alpha = 1.0 + min(MAX_PRICE, PRICE * backlogs_s[count // 4] / busy_s)
    if not begins:
        return Prices(alpha, rotation=0.0)
    if not forks:
        return Prices(alpha, rotation=ROTATION * spread)
    return Prices(
        alpha,
        rotation=ROTATION * spread,
        copy=COPY_PRICE * (1.0 - spread),
        copy_uses=1.0 + spread * forks,
    )


class CostTerms(NamedTuple):
    """The terms of the formula above, in its order: seconds, as they are priced."""

    waiting: float
    reload: float
    memory: float
    own: float
    copy: float
    lora: float
    rotation: float
    decode: float


def terms_s(candidate: Candidate, prices: Prices) -> CostTerms:
    """Return what the candidate's cost consists of."""
    own_s, copy_s = candidate.own_s, candidate.copy_s
    price = (prices.alpha - 1.0) * candidate.worth
    return CostTerms(
        candidate.backlog_s,
        candidate.reload_s,
        candidate.memory_s,
        (1.0 + price) * own_s,
        (1.0 + price + prices.copy * candidate.worth) * copy_s / prices.copy_uses,
        (1.0 + price) * candidate.lora_s,
        prices.rotation * own_s * min(2.0, candidate.branch_share - 1.0),
        candidate.decode_step_s * (DECODE_STEPS + candidate.steps),
    )


def cost_s(candidate: Candidate, prices: Prices) -> float:
    """Return the sum of the terms."""
    return sum(terms_s(candidate, prices))


def rank(
    candidates: Sequence[Candidate],
    *,
    rng: random.Random,
    busy_s: float,
    pressure: float = 0.0,
    forks: float = 1.0,
) -> list[Candidate]:
    """Return the candidates, the cheapest first.

    At equal cost, the candidate with the most free KV blocks comes first, then chance decides.
    """
    if not candidates:
        return []
    common = prices(candidates, busy_s=busy_s, pressure=pressure, forks=forks)
    draw = rng.random
    ranked = sorted([(cost_s(c, common), -c.free_blocks, draw(), c) for c in candidates])
    return [each[-1] for each in ranked]
