"""Decides which blocks of a prompt a replica pulls from another replica, its peer.

The peer must have the blocks in host memory: its block server reads them there, and no engine step
takes part. What is pulled arrives in the host memory of the replica that pulls, and is copied from
there to its GPU like any hit in host memory.

For each replica, the blocks after its own hit are either pulled or computed, whichever costs less
at the prices of this request (policy.py). A pull takes

    latency + bytes / bandwidth of the link + wait for the pulls in progress + copy to the GPU

and no GPU time. Its cost is a term of the replica (policy.py: Price), which includes the
time that it takes from the other pulls of the peer, and the later work for the blocks that it
evicts. Of the peers that have the most blocks, the one with the fewest pulls
in progress is chosen.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from heapq import nsmallest
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST, PEER, TierBlocks
from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.contract.records import ReplicaRecord
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.placing_feature import PlacingFeature
from kvroute.features.pulls.pull_links import PullLinks
from kvroute.replica.fabric.pull import (
    FEATURE,
    MAX_WITHIN_S,
    LinkSpeed,
    Pull,
    PullResult,
    carried,
    carried_in,
    decode_exchanging,
)
from kvroute.router.index.mirror import deepest
from kvroute.router.placement.attempts import Attempt
from kvroute.router.placement.policy import (
    MAX_PRICE,
    Candidate,
    Prices,
    PromptFacts,
    Term,
    copy_cost_s,
)

if TYPE_CHECKING:
    from kvroute.router.placement.fleet import Fleet
    from kvroute.wire.address import TlsMode

TERM = "pull"  # name of the term
# A pull may take its predicted time, and this share of the time to compute its blocks. Then the
# engine computes what has not come.
MARGIN = 0.5
# Pulls are planned for at most so many replicas per request, those with the shortest waits. The
# price of a pull is similar for all replicas, so the others would hardly be chosen.
MOST = 8
# Results of pulls that are faults of the peer, of the link or of the replica that pulls. A block
# that is gone is none: the index was late.
FAULTS = frozenset({"lost", "refused", "damaged"})


class Exchange(NamedTuple):
    """What a replica needs to exchange blocks of its host memory with others."""

    format: str  # replicas exchange blocks only if their formats are equal
    address: str  # address of the replica's block server; empty: it does not let others pull
    block_bytes: int  # bytes of one block
    speed: LinkSpeed | None  # how fast it pulls; None: it does not pull


class PullAccess(NamedTuple):
    """What a replica needs to connect to the block server of a peer."""

    key: bytes  # pull_key of the peer
    tls: "TlsMode" = "off"


class PeerPull(NamedTuple):
    """Blocks of a prompt that a replica would pull from another replica, its peer."""

    peer_id: str
    blocks: int  # the peer has this many leading blocks of the prompt in its host memory
    transfer_s: float  # seconds of the transfer if no other pull is in progress
    speed: LinkSpeed  # how fast the replica pulls, by its own figures
    wait_s: float  # seconds until the earlier pulls at both ends should be done
    reload_s: float  # seconds of the copy from the replica's host memory to the GPU
    delay_s: float  # seconds that the pulls in progress at the peer lose
    saved_s: float  # seconds of prefill that the pull replaces

    @property
    def term(self) -> Term:
        """Return the pull as a term of its replica's cost."""
        seconds = self.wait_s + self.transfer_s + self.reload_s
        return Term(TERM, seconds, "network", self.delay_s, self.saved_s, self.peer_id, self)


class Offer(NamedTuple):
    """Leading blocks of a prompt that peers have in host memory."""

    blocks: int
    # The replicas that have all of them, those with the fewest pulls in progress first.
    peer_ids: Sequence[str]


class PullRate(NamedTuple):
    """How fast a replica pulls over its slowest link, compared with computing."""

    bytes_per_s: float
    tokens: int  # tokens of one step of its engine
    pull_s: float  # time to pull the blocks of so many tokens, with the copy to the GPU
    computing_s: float  # time to compute them


# How long the prompt waits at a replica without the pull, the candidate's index, and what it needs.
_Able = tuple[float, int, Exchange, Offer]
NO_OFFERS: Mapping[str, Offer] = {}


def pull_of(candidate: Candidate) -> PeerPull | None:
    """Return what a candidate would pull; None: nothing."""
    term = candidate.term(TERM) if candidate.terms else None
    pull: PeerPull | None = term and term.data
    return pull


class PlannedPulls(PlacingFeature):
    """Plans the pulls of one model's replicas, and learns from their results."""

    name = FEATURE
    _fleet: "Fleet"  # from the first `updated` on

    def __init__(self) -> None:
        self.links = PullLinks()
        # Replica id -> how it exchanges blocks with others. Replicas that do not have no entry.
        self.exchanges: Mapping[str, Exchange] = {}
        self._sources: dict[str, list[str]] = {}  # format -> replicas that let others pull
        # Id of a request with a pull that has not ended -> the result; None: it is not known yet.
        self._results: dict[str, PullResult | None] = {}

    def updated(self, fleet: "Fleet") -> None:
        self._fleet = fleet
        degraded = fleet.replicas.degraded
        records = [record for record in fleet.replicas.records if record.id not in degraded]
        self.exchanges = _exchanges(records)
        self._sources = {}
        for replica_id, exchange in self.exchanges.items():
            if exchange.address:
                self._sources.setdefault(exchange.format, []).append(replica_id)
        self.links.keep(self.exchanges.keys())

    def access(self, rank_id: str) -> PullAccess | None:
        """Return how to connect to a peer; None: this is not known."""
        return PullAccess(b"")  # a modelled replica needs no key

    def count(self, result: PullResult | None) -> None:
        """Count a pull that has ended; None: its result is unknown."""

    def weigh(
        self, prompt: PromptFacts, candidates: Sequence[Candidate], now_s: float
    ) -> Sequence[Candidate]:
        """Return the candidates, with a pull where it costs less than computing the blocks."""
        offers = self.offers(prompt.chain, prompt.best_hit_blocks)
        return self._apply(candidates, offers, prompt, now_s) if offers else candidates

    def offers(self, chain: Sequence[Fingerprint], best: int) -> Mapping[str, Offer]:
        """Return the blocks that peers have, by format; without formats of which no peer has any.

        Args:
            chain: the prompt's reusable blocks.
            best: blocks of the longest hit on any replica. Peers' further blocks do not count.
        """
        if not best or not self._sources:
            return NO_OFFERS
        offers = {}
        for format_, sources in self._sources.items():
            blocks, peer_ids = deepest(self._fleet.mirror, chain, HOST, sources, best)
            if blocks:
                peer_ids.sort(key=lambda id_: (self.links.pulls_from(id_), id_))
                offers[format_] = Offer(blocks, peer_ids)
        return offers

    def _apply(
        self,
        candidates: Sequence[Candidate],
        offers: Mapping[str, Offer],
        prompt: PromptFacts,
        now_s: float,
    ) -> Sequence[Candidate]:
        """Return the candidates, with a pull where it costs less than computing the blocks.

        Under overload there are none: all replicas have enough to do, so a prompt that moves gains
        little, and takes the place of another one.

        Args:
            offers: the blocks that peers have, by format.
        """
        if prompt.prices.alpha >= 1.0 + MAX_PRICE:
            return candidates
        chosen, exchanges, able = [*candidates], self.exchanges, list[_Able]()
        for index, candidate in enumerate(candidates):
            exchange = exchanges.get(candidate.replica_id)
            if exchange is None or exchange.speed is None or candidate.copy_s <= 0.0:
                continue
            offer = offers.get(exchange.format)
            if offer is not None and offer.blocks > candidate.hit_blocks:
                waits_s = candidate.backlog_s + candidate.memory_s + candidate.reload_s
                able.append((waits_s, index, exchange, offer))
        if len(able) > MOST:
            able = nsmallest(MOST, able, key=itemgetter(0))
        for _, index, exchange, offer in able:
            chosen[index] = self._with_pull(candidates[index], exchange, offer, prompt, now_s)
        return chosen

    def _with_pull(
        self,
        candidate: Candidate,
        exchange: Exchange,
        offer: Offer,
        prompt: PromptFacts,
        now_s: float,
    ) -> Candidate:
        """Return the candidate with a pull from the best peer, or without it if that costs less."""
        block_size = prompt.block_size
        best_tokens = prompt.best_hit_blocks * block_size
        hit_tokens = candidate.hit_blocks * block_size
        load, end = self._fleet.loads.of(candidate.replica_id), offer.blocks * block_size
        left_s = 0.0
        if end < best_tokens:
            seconds = load.model.seconds
            left_s = candidate.copy_s * seconds(end, best_tokens) / seconds(hit_tokens, best_tokens)
        pull = self._pull(candidate, exchange, offer, candidate.copy_s - left_s, now_s)
        if pull is None:
            return candidate
        term = pull.term
        if not self.is_worth(term, candidate, prompt.prices):
            return candidate
        blocks = offer.blocks - candidate.hit_blocks
        return candidate._replace(
            hit_blocks=offer.blocks,
            copy_s=left_s,
            steps=candidate.steps - blocks * block_size / load.step_tokens,
            reloads=(*candidate.reloads, TierBlocks(PEER, blocks)),
            terms=(*candidate.terms, term),
        )

    def _pull(
        self,
        candidate: Candidate,
        exchange: Exchange,
        offer: Offer,
        saved_s: float,
        now_s: float,
    ) -> PeerPull | None:
        """Return the pull of the offer's blocks; None if no peer can be asked now.

        Args:
            saved_s: seconds of prefill that the pull replaces.
        """
        target, links = candidate.replica_id, self.links
        peer_id = next(
            (id_ for id_ in offer.peer_ids if id_ != target and links.is_open(id_, target, now_s)),
            None,
        )
        if peer_id is None or exchange.speed is None:
            return None
        count, wait_s = links.pulls_from(peer_id), links.wait_s(peer_id, target, now_s)
        blocks = offer.blocks - candidate.hit_blocks
        predicted_s = exchange.speed.seconds(blocks * exchange.block_bytes)
        transfer_s = links.slowness(peer_id, target) * predicted_s
        return PeerPull(
            peer_id,
            offer.blocks,
            transfer_s=transfer_s,
            speed=exchange.speed,
            wait_s=wait_s,
            reload_s=self._fleet.replicas.tiers[target][HOST].reload_s(blocks),
            delay_s=count * transfer_s,
            saved_s=saved_s,
        )

    def is_worth(self, term: Term, candidate: Candidate, prices: Prices) -> bool:
        """Return whether a pull costs less than computing its blocks."""
        computing_s = copy_cost_s(term.evicted_s, candidate.worth, prices)
        return term.cost_s(candidate.worth, prices) < computing_s

    def sending(self, request: GenerateRequest, attempt: Attempt) -> GenerateRequest:
        """Count the pull of a request, and return the request with the order to pull."""
        if not attempt.terms or attempt.placement is None:
            return request
        candidate = attempt.placement.candidate(attempt.replica_id)
        if (pull := pull_of(candidate)) is None:
            return request
        end_s = attempt.sent_s + pull.wait_s + pull.transfer_s
        id_, target = attempt.request_id, attempt.replica_id
        self.links.begin(id_, pull.peer_id, target, speed=pull.speed, end_s=end_s)
        self._results[id_] = None
        order = self._order(candidate, pull, attempt.placement.block_size)
        return replace(request, features={**(request.features or {}), **carried(order)})

    def _order(self, candidate: Candidate, pull: PeerPull, block_size: int) -> Pull | None:
        """Return the candidate's pull as its replica gets it.

        If the peer has gone since the placement, the result is None, and the replica computes the
        blocks. The pull may start when the prompts before it are computed.

        Args:
            block_size: tokens of a block.
        """
        peer, access = self.exchanges.get(pull.peer_id), self.access(pull.peer_id)
        if peer is None or not peer.address or access is None:
            return None
        # How long the engine may wait, from the request's arrival.
        within_s = candidate.backlog_s + pull.wait_s + pull.transfer_s + MARGIN * pull.saved_s
        tokens = pull.blocks * block_size
        within_s = min(within_s, MAX_WITHIN_S)
        return Pull(pull.peer_id, peer.address, access.key, tokens, within_s, access.tls)

    def answering(self, attempt: Attempt, chunk: Chunk, now_s: float) -> None:
        """Learn from the result of a pull. Without one, the pull is over at the first token."""
        result = carried_in(chunk.features, PullResult)
        if attempt.request_id in self._results and result is not None:
            self._results[attempt.request_id] = result
        self.end(attempt.request_id, result, now_s)

    def attempt_ended(self, attempt: Attempt) -> None:
        if attempt.request_id in self._results:
            self.end(attempt.request_id, None, attempt.end_s)
            self.count(self._results.pop(attempt.request_id))

    def speeds(self) -> dict[str, PullRate]:
        """Return how fast each replica pulls, by id; without replicas that do not pull."""
        speeds, slowest = {}, self.links.slowest()
        for replica_id, exchange in self.exchanges.items():
            record, load = self._fleet.replicas.get(replica_id), self._fleet.loads.of(replica_id)
            if exchange.speed is None or record is None:
                continue
            blocks = max(1, load.step_tokens // record.facts.block_size)
            tokens, slowness = blocks * record.facts.block_size, slowest.get(replica_id, 1.0)
            speeds[replica_id] = PullRate(
                exchange.speed.bytes_per_s / slowness,
                tokens,
                self.copying_s(replica_id, blocks, slowness=slowness),
                load.computing_s(0, tokens),
            )
        return speeds

    def copying_s(self, replica_id: str, blocks: int, *, slowness: float) -> float:
        """Return the time to pull blocks, with the copy to the GPU.

        Args:
            replica_id: a rank that can pull.
            blocks: the number of blocks.
            slowness: how many times slower than measured by the rank the link is.
        """
        exchange = self.exchanges[replica_id]
        assert exchange.speed is not None
        link_s = slowness * exchange.speed.seconds(blocks * exchange.block_bytes)
        return link_s + self._fleet.replicas.tiers[replica_id][HOST].reload_s(blocks)

    def end(self, request_id: str, result: PullResult | None, now_s: float) -> None:
        """Record that a request's pull is over, and learn from its result.

        Args:
            result: what the pull has done; None: unknown, for example because the replica was lost.
        """
        transfer = self.links.end(request_id)
        if transfer is None or result is None:
            return
        if result.reason in FAULTS or (result.reason == "late" and not result.tokens):
            self.links.fail(transfer, now_s, busy_s=self._fleet.loads.scale.busy_s)
        elif result.size_bytes:
            self.links.learn(transfer, result.size_bytes, result.took_s)


class UnconditionalPulls(PlannedPulls):
    """Plans a pull for each replica that has less of the prompt than another one."""

    def is_worth(self, term: Term, candidate: Candidate, prices: Prices) -> bool:
        return True


# Policy of a replay, without "kvroute-" -> what it does about pulls; None: there are none.
REPLAYED: Mapping[str, Callable[[], PlannedPulls] | None] = {
    "never-pull": None,
    "always-pull": UnconditionalPulls,
}


def _exchanges(records: Iterable[ReplicaRecord]) -> dict[str, Exchange]:
    """Return how replicas exchange blocks of their host memory, by replica id.

    Engines with several cache groups do not, since a pull is a number of leading tokens.
    """
    exchanges = {}
    for record in records:
        facts, packed = record.facts, record.load.features.get(FEATURE)
        if packed is None or facts.layout is not None:
            continue
        if (tier := facts.tiers.get(HOST)) is None or not facts.prefix_caching:
            continue
        with suppress(*DECODE_ERRORS):  # then the replica exchanges no blocks
            its = decode_exchanging(packed)
            exchange = Exchange(its.format, its.address, tier.block_bytes, its.speed)
            exchanges[record.id] = exchange
    return exchanges
