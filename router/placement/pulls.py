"""Decides which blocks of a prompt a replica pulls from another replica, its peer.

The peer must have the blocks in host memory: its block server reads them there, and no engine step
takes part. What is pulled arrives in the host memory of the replica that pulls, and is copied from
there to its GPU like any hit in host memory.

For each replica, the blocks after its own hit are either pulled or computed, whichever costs less
at the prices of this request (policy.py). A pull takes

    latency + bytes / bandwidth of the link + wait for the pulls in progress + copy to the GPU

and its cost includes the time that it takes from the other pulls of the peer, and the later work
for the blocks that it evicts. Of the peers that have the most blocks, the one with the fewest pulls
in progress is chosen.
"""

from collections.abc import Mapping, Sequence
from heapq import nsmallest
from operator import itemgetter
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import HOST, PEER, TierBlocks
from kvroute.contract.pull import Pull, PullAccess, PullResult
from kvroute.router.index.mirror import Mirror, deepest
from kvroute.router.placement.loads import Loads
from kvroute.router.placement.policy import (
    MAX_PRICE,
    Candidate,
    PeerPull,
    Prices,
    copy_cost_s,
    pull_cost_s,
)
from kvroute.router.placement.replicas import Exchange, ReplicaRegistry
from kvroute.router.pulls.links import PullLinks

# A pull may take its predicted time, and this share of the time to compute its blocks. Then the
# engine computes what has not come.
MARGIN = 0.5
# Pulls are planned for at most so many replicas per request, those with the shortest waits. The
# price of a pull is similar for all replicas, so the others would hardly be chosen.
MOST = 8
# Results of pulls that are faults of the peer, of the link or of the replica that pulls. A block
# that is gone is none: the index was late.
FAULTS = frozenset({"lost", "refused", "damaged"})


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


class Pulls:
    """Plans the pulls of one model's replicas, and learns from their results.

    Args:
        replicas: the replicas' records.
        loads: the replicas' loads, for the speed of prefill.
        mirror: the router's copy of the index of cached blocks.
    """

    def __init__(self, replicas: ReplicaRegistry, loads: Loads, mirror: Mirror) -> None:
        self.links = PullLinks()
        self._replicas = replicas
        self._loads = loads
        self._mirror = mirror
        self.is_on = True  # whether requests may pull at all
        self._sources: dict[str, list[str]] = {}  # format -> replicas that let others pull

    def update(self) -> None:
        """Read from the registry which replicas exchange blocks."""
        exchanges = self._replicas.exchanges
        self._sources = {}
        for replica_id, exchange in exchanges.items():
            if exchange.address:
                self._sources.setdefault(exchange.format, []).append(replica_id)
        self.links.keep(exchanges.keys())

    def offers(self, chain: Sequence[Fingerprint], best: int) -> Mapping[str, Offer]:
        """Return the blocks that peers have, by format; without formats of which no peer has any.

        Args:
            chain: the prompt's reusable blocks.
            best: blocks of the longest hit on any replica. Peers' further blocks do not count.
        """
        if not best or not self._sources or not self.is_on:
            return NO_OFFERS
        offers = {}
        for format_, sources in self._sources.items():
            blocks, peer_ids = deepest(self._mirror, chain, HOST, sources, best)
            if blocks:
                peer_ids.sort(key=lambda id_: (self.links.pulls_from(id_), id_))
                offers[format_] = Offer(blocks, peer_ids)
        return offers

    def apply(
        self,
        candidates: Sequence[Candidate],
        offers: Mapping[str, Offer],
        *,
        best: int,
        block_size: int,
        prices: Prices,
        now_s: float,
    ) -> list[Candidate]:
        """Return the candidates, with a pull where it costs less than computing the blocks.

        Under overload there are none: all replicas have enough to do, so a prompt that moves gains
        little, and takes the place of another one.

        Args:
            offers: the blocks that peers have, by format.
            best: blocks of the longest hit on any replica.
            block_size: tokens of a block.
            prices: the factors of this request.
            now_s: the current time.
        """
        if prices.alpha >= 1.0 + MAX_PRICE:
            return [*candidates]
        chosen, exchanges, able = [*candidates], self._replicas.exchanges, list[_Able]()
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
            chosen[index] = self._with_pull(
                candidates[index], exchange, offer, best * block_size, block_size, prices, now_s
            )
        return chosen

    def _with_pull(
        self,
        candidate: Candidate,
        exchange: Exchange,
        offer: Offer,
        best_tokens: int,
        block_size: int,
        prices: Prices,
        now_s: float,
    ) -> Candidate:
        """Return the candidate with a pull from the best peer, or without it if that costs less."""
        replica_id, hit_tokens = candidate.replica_id, candidate.hit_blocks * block_size
        load, end = self._loads.of(replica_id), offer.blocks * block_size
        left_s = 0.0
        if end < best_tokens:
            seconds = load.model.seconds
            left_s = candidate.copy_s * seconds(end, best_tokens) / seconds(hit_tokens, best_tokens)
        pull = self._pull(candidate, exchange, offer, candidate.copy_s - left_s, now_s)
        if pull is None:
            return candidate
        if not self.is_worth(pull, candidate, prices):
            return candidate
        blocks = offer.blocks - candidate.hit_blocks
        return candidate._replace(
            hit_blocks=offer.blocks,
            copy_s=left_s,
            steps=candidate.steps - blocks * block_size / load.step_tokens,
            reloads=(*candidate.reloads, TierBlocks(PEER, blocks)),
            pull=pull,
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
            reload_s=self._replicas.tiers[target][HOST].reload_s(blocks),
            delay_s=count * transfer_s,
            saved_s=saved_s,
        )

    def is_worth(self, pull: PeerPull, candidate: Candidate, prices: Prices) -> bool:
        """Return whether the pull costs less than computing its blocks."""
        computing_s = copy_cost_s(pull.saved_s, candidate.worth, prices)
        return pull_cost_s(pull, prices) < computing_s

    def within_s(self, candidate: Candidate) -> float:
        """Return how long the engine may wait for the candidate's pull, from the request's arrival.

        The pull may start when the prompts before it are computed.
        """
        pull = candidate.pull
        if pull is None:
            return 0.0
        return candidate.backlog_s + pull.wait_s + pull.transfer_s + MARGIN * pull.saved_s

    def order(
        self, candidate: Candidate, block_size: int, access: PullAccess | None
    ) -> Pull | None:
        """Return the candidate's pull as its replica gets it.

        The result is None if it pulls nothing, or if the peer has gone since the placement.

        Args:
            block_size: tokens of a block.
            access: how to connect to the peer; None: the router does not know it.
        """
        pull = candidate.pull
        peer = self._replicas.exchanges.get(pull.peer_id) if pull else None
        if pull is None or peer is None or not peer.address or access is None:
            return None
        tokens = pull.blocks * block_size
        within_s = self.within_s(candidate)
        return Pull(pull.peer_id, peer.address, access.key, tokens, within_s, access.tls)

    def speeds(self) -> dict[str, PullRate]:
        """Return how fast each replica pulls, by id; without replicas that do not pull."""
        speeds, slowest = {}, self.links.slowest()
        for replica_id, exchange in self._replicas.exchanges.items():
            record, load = self._replicas.get(replica_id), self._loads.of(replica_id)
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
        exchange = self._replicas.exchanges[replica_id]
        assert exchange.speed is not None
        link_s = slowness * exchange.speed.seconds(blocks * exchange.block_bytes)
        return link_s + self._replicas.tiers[replica_id][HOST].reload_s(blocks)

    # Pulls in progress.

    def begin(self, request_id: str, candidate: Candidate, now_s: float) -> None:
        """Count the pull of a request that is sent to the candidate's replica."""
        if (pull := candidate.pull) is None:
            return
        self.links.begin(
            request_id,
            pull.peer_id,
            candidate.replica_id,
            speed=pull.speed,
            end_s=now_s + pull.wait_s + pull.transfer_s,
        )

    def end(self, request_id: str, result: PullResult | None, now_s: float) -> None:
        """Record that a request's pull is over, and learn from its result.

        Args:
            result: what the pull has done; None: unknown, for example because the replica was lost.
        """
        transfer = self.links.end(request_id)
        if transfer is None or result is None:
            return
        if result.reason in FAULTS or (result.reason == "late" and not result.tokens):
            self.links.fail(transfer, now_s, busy_s=self._loads.scale.busy_s)
        elif result.size_bytes:
            self.links.learn(transfer, result.size_bytes, result.took_s)
