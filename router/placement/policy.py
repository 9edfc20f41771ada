"""Ranks replicas for a request by cost. This module only computes: no clock, no socket, no Ray.

    cost = waiting + reload + memory + own + copy + setup
           + worth * ((alpha - 1) * (own + copy + setup) + COPY_PRICE * copy)
           + rotation + decode + eviction + terms of features

In an idle fleet, copying the common prefix of many conversations costs less (see rotation). The
terms are in seconds; alpha, worth and COPY_PRICE are factors:

    waiting  prefill that is queued or running on the replica
    reload   copying back blocks of the prompt that the replica has in slower tiers, such as host
             memory, and the earlier copies there that have to end first. It delays this request
             only and takes no GPU time
    memory   time until running answers have ended and the KV cache has space for the prompt
    own      prefill of the tokens that no replica has cached: it is the same work on every replica
    copy     prefill of the tokens that another replica has cached and this one has not, and does
             not get otherwise. Unlike own, it has the surcharge COPY_PRICE even if the fleet is
             idle: it takes GPU time that other requests could use, and its blocks evict others
    setup    loading the request's variant of the model, such as a LoRA adapter, if it is not
             loaded. The engine computes nothing meanwhile
    alpha    the price of congestion. It is 1 while a quarter of the fleet is idle, and rises with
             the lower quartile of the waiting times, since recomputing a prefix delays all requests
             that are queued after it
    worth    1 for a healthy replica. For a replica that is slow because of a fault: the time that a
             healthy one needs, divided by its own time. The time of a slow replica is worth less to
             other requests
    rotation a term that spreads new conversations evenly over an idle fleet, since the later turns
             of each conversation will go to the same replica. A prompt starts a conversation if no
             replica has its first block, or if earlier prompts diverged from it at the end of the
             longest hit. Such prompts are called forks. They share a prefix, such as a system
             prompt, and another replica that computes it can serve later forks. So copy has no
             surcharge then, and is divided by the number of forks plus one. These rules fade out as
             replicas become busy and cache pressure rises
    decode   how much this prompt slows down the answers that the replica is generating
    eviction the work that this prompt's new blocks cause later, since they evict others. By the
             cache pressure, a part of what they evict is requested again. That part is larger where
             running requests hold more of the cache: the rest of it is replaced more often, so that
             blocks are evicted sooner after their use

A feature adds terms (`Term`) with `PlacingFeature.weigh`. It says in seconds what a term takes, and
`Price` says what that costs.

Only waiting + own + copy would be too simple: a long prefix would be recomputed on an idle replica
to save this request a little time, at the expense of all other requests.

The constants have no units. Times are relative to the fleet's unit of time (scale.py). So engines
that are k times slower get the same decisions if their requests arrive k times more slowly.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import TierBlocks

PRICE = 35.0  # alpha - 1 if the lower quartile of the waiting times is one Scale.busy_s
MAX_PRICE = 40.0  # upper bound of alpha - 1
COPY_PRICE = 2.5  # surcharge for `copy`, as a multiple of it
# The term `eviction` is multiplied by the share of the cache that running requests hold to this
# power, so that only nearly full replicas are avoided.
HELD_POWER = 3
# The term `rotation` of a replica that got twice as many new conversations as the mean, as a
# multiple of `own`.
ROTATION = 1.25
# Rotation is multiplied by the idle share of the fleet to this power, so that it fades out quickly.
IDLE_POWER = 16
# Number of decode steps in which a new request slows down the running answers, in addition to the
# engine steps that compute this prompt and the prompts before it.
DECODE_STEPS = 11.0


# What the seconds of a term are spent on, which says what they cost.
# wait     they delay this request only
# gpu      the replica computes nothing else meanwhile: they cost as much as `own`
# network  they use the network, and no GPU time. But in a busy fleet, a prompt that moves to the
#          replica with the shortest queue delays prompts there that no replica has cached
# others   they delay other requests, and not this one
Price = Literal["wait", "gpu", "network", "others"]


class Term(NamedTuple):
    """A term of the cost that a feature adds to a candidate."""

    name: str  # its name in receipts; Feature.terms has its words
    seconds: float  # time until the prompt can be computed
    price: Price
    others_s: float = 0.0  # network: seconds that other copies lose meanwhile
    evicted_s: float = 0.0  # network: seconds of prefill of the blocks that the copy brings
    source_id: str = ""  # the other replica that it needs; empty: none
    data: Any = None  # what the feature keeps with it

    def cost_s(self, worth: float, prices: "Prices") -> float:
        """Return the term of a candidate with this worth, multiplied by its price."""
        if self.price == "network":
            cost_s = prices.alpha * (self.seconds + self.others_s)
            evicted_s = prices.pressure * prices.alpha * self.evicted_s  # computed again later
            return (cost_s + evicted_s) / prices.copy_uses
        if self.price == "gpu":
            return (1.0 + (prices.alpha - 1.0) * worth) * self.seconds
        return self.seconds


class Candidate(NamedTuple):
    """One replica as a candidate for one request.

    It is a tuple, since a placement creates one for each replica.
    """

    replica_id: str
    # Leading blocks of the prompt that it has cached in any tier, or will have when the requests
    # that were sent there are computed.
    hit_blocks: int
    backlog_s: float  # seconds of prefill queued or running there
    own_s: float  # seconds of prefill of the tokens that no replica has cached
    copy_s: float = 0.0  # seconds of prefill of the tokens that only other replicas have cached
    steps: float = 0.0  # engine steps to compute this prompt and all prompts that wait there
    decode_step_s: float = 0.0  # seconds that the replica's running answers add to each step
    free_blocks: int = 0  # KV blocks that no running request holds
    unanswered: int = 0  # requests that were sent there and have not ended
    memory_s: float = 0.0  # seconds until the KV cache has space for the prompt
    setup_s: float = 0.0  # seconds to load the prompt's variant of the model; 0: it is loaded
    reloads: tuple[TierBlocks, ...] = ()  # the part of hit_blocks that is in slower tiers
    reload_s: float = 0.0  # seconds until the blocks in `reloads` are in GPU memory
    worth: float = 1.0  # see `worth` in the module; less than 1 for a slow replica
    # Number of conversations that started there with the prefix of the longest hit, divided by the
    # mean of all replicas.
    branch_share: float = 1.0
    held_share: float = 0.0  # tokens of unanswered requests, as a share of its KV cache
    terms: tuple[Term, ...] = ()  # the terms of features

    def term(self, name: str) -> Term | None:
        """Return the term of a feature; None: this candidate has none of this name."""
        return next((term for term in self.terms if term.name == name), None)

    @property
    def loads_first(self) -> bool:
        """Return whether something has to be loaded there before the prompt can be computed."""
        is_held_up = any(term.price != "others" for term in self.terms)
        return self.setup_s > 0 or self.reload_s > 0 or is_held_up

    @property
    def terms_wait_s(self) -> float:
        """Return the seconds that terms of features delay this request but not others."""
        return sum([term.seconds for term in self.terms if term.price in ("wait", "network")])

    @property
    def stopped_s(self) -> float:
        """Return the seconds before this prompt in which the engine computes nothing."""
        terms = [term.seconds for term in self.terms if term.price == "gpu"]
        return self.setup_s + sum(terms)

    @property
    def gpu_blocks(self) -> int:
        """Return the part of hit_blocks that is in GPU memory."""
        return self.hit_blocks - sum([part.blocks for part in self.reloads])

    @property
    def ttft_s(self) -> float:
        """Return the predicted time to the first token of this request, in seconds."""
        waits_s = self.backlog_s + self.reload_s + self.terms_wait_s + self.memory_s
        return waits_s + self.own_s + self.copy_s + self.stopped_s


@dataclass(frozen=True, slots=True)
class Prices:
    """The factors that apply to all candidates of one request."""

    alpha: float  # price of congestion
    rotation: float  # factor of the term `rotation`; 0 unless the prompt starts a conversation
    copy: float = COPY_PRICE  # surcharge for the term `copy`, as a multiple of it
    # Conversations that share the cost of `copy` and of copies over the network.
    copy_uses: float = 1.0
    pressure: float = 0.0  # cache pressure, see pressure.py


NO_PRICES = Prices(alpha=1.0, rotation=0.0)  # each term of the cost counts as its time


class PromptFacts(NamedTuple):
    """What a placement knows about its prompt, for features."""

    chain: Sequence[Fingerprint]  # its reusable blocks
    best_hit_blocks: int  # blocks of the longest hit on any replica
    block_size: int  # tokens of a block
    prompt_tokens: int
    variant: str  # the variant of the model; see Scope
    prices: Prices


def prices(
    candidates: Sequence[Candidate],
    *,
    busy_s: float,
    pressure: float = 0.0,
    forks: float = 1.0,
) -> Prices:
    """Return the prices for a request.

    Args:
        busy_s: Scale.busy_s, the fleet's unit of time.
        pressure: cache pressure, see pressure.py.
        forks: number of earlier prompts that diverged from this one at the end of the longest hit.
    """
    if not candidates:
        return NO_PRICES
    backlogs_s = sorted([candidate.backlog_s for candidate in candidates])
    count = len(backlogs_s)
    is_start = forks > 0 or not any(candidate.hit_blocks for candidate in candidates)
    # The factor with which the rules for rotation fade out: 1 if all replicas are idle.
    fade = (backlogs_s.count(0.0) / count) ** IDLE_POWER * max(0.0, 1.0 - pressure)
    alpha = 1.0 + min(MAX_PRICE, PRICE * backlogs_s[count // 4] / busy_s)
    return Prices(
        alpha,
        rotation=ROTATION * fade if is_start else 0.0,
        copy=COPY_PRICE * (1.0 - fade) if forks else COPY_PRICE,
        copy_uses=1.0 + fade * forks,
        pressure=pressure,
    )


class CostTerms(NamedTuple):
    """The terms of the cost in seconds, each multiplied by its price, without those of features."""

    waiting: float
    reload: float
    memory: float
    own: float
    copy: float
    setup: float
    rotation: float
    decode: float
    eviction: float


def terms_s(candidate: Candidate, prices: Prices) -> dict[str, float]:
    """Return the terms of the candidate's cost by name, also those of features."""
    terms = CostTerms(*_terms(candidate, prices))._asdict()
    return terms | {term.name: term.cost_s(candidate.worth, prices) for term in candidate.terms}


def cost_s(candidate: Candidate, prices: Prices) -> float:
    """Return the candidate's cost: the sum of its terms."""
    cost_s = sum(_terms(candidate, prices))
    for term in candidate.terms:
        cost_s += term.cost_s(candidate.worth, prices)
    return cost_s


def copy_cost_s(copy_s: float, worth: float, prices: Prices) -> float:
    """Return the term `copy` of a candidate."""
    price = (prices.alpha - 1.0) * worth
    return (1.0 + price + prices.copy * worth) * copy_s / prices.copy_uses


def _terms(candidate: Candidate, prices: Prices) -> tuple[float, ...]:
    """Return the fields of `CostTerms` as a plain tuple, which is made in a third of the time."""
    own_s, copy_s = candidate.own_s, candidate.copy_s
    price = (prices.alpha - 1.0) * candidate.worth
    return (
        candidate.backlog_s,
        candidate.reload_s,
        candidate.memory_s,
        (1.0 + price) * own_s,
        (1.0 + price + prices.copy * candidate.worth) * copy_s / prices.copy_uses,
        (1.0 + price) * candidate.setup_s,
        prices.rotation * own_s * min(2.0, candidate.branch_share - 1.0),
        candidate.decode_step_s * (DECODE_STEPS + candidate.steps),
        prices.pressure and prices.pressure * (own_s + copy_s) * candidate.held_share**HELD_POWER,
    )


def rank(
    candidates: Sequence[Candidate],
    *,
    rng: random.Random,
    prices: Prices,
) -> list[Candidate]:
    """Return the candidates in ascending order of their cost.

    At equal cost, the candidate with more free KV blocks comes first. If these are equal too, the
    order is random.

    Args:
        candidates: one candidate for each replica.
        rng: the source of the random order.
        prices: the factors of this request.
    """
    draw = rng.random
    ranked = sorted([(cost_s(c, prices), -c.free_blocks, draw(), c) for c in candidates])
    return [candidate for *_, candidate in ranked]
