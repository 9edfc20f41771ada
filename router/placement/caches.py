"""Looks up which blocks of a prompt each replica has cached."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvroute.blocks.chain import EVERYBODY, Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan, reusable_blocks
from kvroute.blocks.tiers import Tier, TierBlocks
from kvroute.contract.generation import TokenIds
from kvroute.contract.records import ReplicaRecord
from kvroute.router.index.mirror import Mirror
from kvroute.router.placement.loads import Loads
from kvroute.router.placement.replicas import ReplicaRegistry


class Reload(NamedTuple):
    """Blocks of a prompt that a replica copies from slower tiers, such as host memory, to the GPU.

    It computes the prompt's remaining blocks after these copies.
    """

    # The blocks to copy from each tier, in the order of the prompt. Empty: the prompt only waits
    # for copies that an earlier request has started.
    parts: tuple[TierBlocks, ...] = ()
    wait_s: float = 0.0  # seconds until all these copies and the ones before them have ended

    @property
    def blocks(self) -> int:
        """Return the number of blocks to copy."""
        return sum([part.blocks for part in self.parts])


NO_RELOAD = Reload()


class Hits(NamedTuple):
    """The leading blocks of one prompt that each replica can use from its cache."""

    blocks: Mapping[str, int]  # replica id -> blocks in all tiers; no entry means no block
    reloads: Mapping[str, Reload]  # replica id -> its reload; no entry means no wait


class Caches:
    """Looks up prompts in the mirror, the router's copy of the index of cached blocks.

    What counts as a hit depends on the layout of each engine's cache (index/boundaries.py).

    Args:
        space: computes the fingerprints of this model's blocks.
        replicas: the replicas' records.
        loads: the replicas' loads, for the speed of prefill and the pending copies.
    """

    def __init__(self, space: Space, replicas: ReplicaRegistry, loads: Loads) -> None:
        self.mirror = Mirror()
        self._space = space
        self._replicas = replicas
        self._loads = loads
        self._tiers: Sequence[Tier] = ()  # slower tiers that replicas have, the fastest first

    @property
    def block_size(self) -> int:
        """Return the number of tokens in a block."""
        return self._space.block_size

    def update(self) -> None:
        """Read from the registry which replicas have slower tiers."""
        by_replica = self._replicas.tiers
        self._tiers = sorted({tier for tiers in by_replica.values() for tier in tiers})
        self.mirror.set_tiers(by_replica)

    # Fingerprints.

    def chain(
        self,
        token_ids: TokenIds,
        scope: Scope = EVERYBODY,
        media: Sequence[MediaSpan] = (),
    ) -> list[Fingerprint]:
        """Return the fingerprints of the prompt's blocks that later prompts can reuse."""
        blocks = self.reusable(len(token_ids))
        return self._space.chain(token_ids[: blocks * self.block_size], scope, media)

    def reusable(self, prompt_tokens: int) -> int:
        """Return the most blocks of a prompt of this length that any replica can reuse later."""
        blocks = reusable_blocks(prompt_tokens, self.block_size)
        layouts = self._replicas.layouts.values()
        if len(layouts) < len(self._replicas) or not layouts:
            return blocks  # at least one engine has a single cache group and can reuse each block
        return max(boundaries.usable(blocks) for boundaries in layouts)

    @property
    def least_blocks(self) -> int:
        """Return the smallest number of leading blocks that can be a hit on every replica."""
        return max((layout.step for layout in self._replicas.layouts.values()), default=1)

    def added(
        self, replica_id: str, chain: Sequence[Fingerprint], hit_blocks: int = 0
    ) -> tuple[Fingerprint, ...]:
        """Return the fingerprints that the replica will publish when it has computed a chain.

        Args:
            hit_blocks: number of the chain's leading blocks that the replica has already.
        """
        if not self._replicas.is_cache_usable(replica_id):
            return ()
        if boundaries := self._replicas.layouts.get(replica_id):
            return tuple(boundaries.added(chain, hit_blocks))
        return tuple(chain[hit_blocks:])

    # Hits.

    def hits(self, chain: Sequence[Fingerprint]) -> dict[str, int]:
        """Return the hits in GPU memory: replica id -> blocks, without replicas that have none."""
        return self._hits(chain)

    def holders(
        self, token_ids: TokenIds, scope: Scope = EVERYBODY, *, tiers: Sequence[Tier] = ()
    ) -> set[str]:
        """Return the replicas that hold all full blocks of these tokens.

        Args:
            tiers: slower tiers that count besides GPU memory.
        """
        chain, hits = self._held(token_ids, scope, tiers)
        return {id_ for id_, blocks in hits.items() if blocks == len(chain)}

    def held_tokens(
        self, token_ids: TokenIds, scope: Scope = EVERYBODY, *, tiers: Sequence[Tier] = ()
    ) -> dict[str, int]:
        """Return how many of these tokens each replica holds in full blocks.

        Args:
            tiers: slower tiers that count besides GPU memory.
        """
        _, hits = self._held(token_ids, scope, tiers)
        return {id_: blocks * self.block_size for id_, blocks in hits.items()}

    def _held(
        self, token_ids: TokenIds, scope: Scope, tiers: Sequence[Tier]
    ) -> tuple[list[Fingerprint], dict[str, int]]:
        # The last token of a prompt is always computed, so the block that it ends is not reusable.
        # One more token makes this block reusable.
        extended = np.append(token_ids, token_ids[:1])
        chain = self.chain(extended, scope)
        return chain, self.hits(chain) | (self._hits(chain, tiers) if tiers else {})

    def find(self, chain: Sequence[Fingerprint], now_s: float) -> Hits:
        """Return which cached blocks of a prompt each replica would use.

        Degraded replicas have no hits.
        """
        hits = self.hits(chain)
        for replica_id in self._replicas.degraded:
            hits.pop(replica_id, None)
        reloads = self._reloads(chain, hits, now_s) if self._tiers else {}
        for replica_id, reload in reloads.items():
            hits[replica_id] = hits.get(replica_id, 0) + reload.blocks
        return Hits(hits, reloads)

    def known(self, chain: Sequence[Fingerprint], at_least: int) -> int:
        """Return how many leading blocks of a chain any replica has now or had before.

        Args:
            at_least: a lower bound of the result, which the caller knows.
        """
        layouts = self._replicas.layouts.values()
        blocks = [layout.known_blocks(chain, self.mirror.is_known) for layout in {*layouts}]
        if len(layouts) < len(self._replicas) or not layouts:
            blocks.append(self.mirror.known_blocks(chain, at_least=at_least))
        return max(at_least, *blocks)

    def partial(self, chain: Sequence[Fingerprint], at_least: int) -> int:
        """Return the longest hit of a chain in the first cache group alone, over all replicas.

        Args:
            at_least: a lower bound of the result, which the caller knows.
        """
        layouts = {*self._replicas.layouts.values()}
        hits = (self.mirror.first_group_hit(chain, layout) for layout in layouts)
        return max((at_least, *hits))

    def capacity_tokens(self, record: ReplicaRecord) -> int:
        """Return how many tokens a replica can keep in its caches.

        A slower tier counts if copying a block back from it is faster than computing the block.
        """
        facts = record.facts
        if not facts.prefix_caching:
            return 0
        compute_s = self._loads.prefill_s(record.id, facts.block_size)
        tiers = self._replicas.tiers.get(record.id, {}).values()
        more_blocks = sum(tier.blocks for tier in tiers if tier.reload_s(1) < compute_s)
        return (facts.capacity_blocks + more_blocks) * facts.block_size

    def _hits(self, chain: Sequence[Fingerprint], tiers: Sequence[Tier] = ()) -> dict[str, int]:
        """Return the hits: replica id -> leading blocks that its engine can reuse.

        Args:
            tiers: slower tiers that count besides GPU memory; only replicas with one of them are
                in the result then.
        """
        hits, layouts = self.mirror.hits(chain, tiers=tiers), self._replicas.layouts
        if not layouts:
            return hits
        hits = {id_: blocks for id_, blocks in hits.items() if id_ not in layouts}
        for layout in set(layouts.values()):
            layout_hits = self.mirror.hits(chain, tiers=tiers, layout=layout)
            hits |= {id_: n for id_, n in layout_hits.items() if layouts.get(id_) is layout}
        return hits

    def _reloads(
        self, chain: Sequence[Fingerprint], hits: Mapping[str, int], now_s: float
    ) -> dict[str, Reload]:
        """Return which blocks each replica would copy back after its hit in GPU memory.

        A replica copies the blocks of a tier if this is faster than computing them. The comparison
        leaves out the wait for the copies of earlier requests. With this wait, computing would
        sometimes seem faster, but it would delay all other requests. The result includes the wait.

        Args:
            hits: the hits in GPU memory.
        """
        reloads = dict[str, Reload]()
        for number, tier in enumerate(self._tiers, start=1):
            for replica_id, depth in self._hits(chain, self._tiers[:number]).items():
                before = reloads.get(replica_id, NO_RELOAD)
                begin = hits.get(replica_id, 0) + before.blocks
                facts = self._replicas.tiers[replica_id].get(tier)
                if facts is None or depth <= begin or replica_id in self._replicas.degraded:
                    continue
                load, copy_s = self._loads.of(replica_id), facts.reload_s(depth - begin)
                compute_s = load.model.seconds(begin * self.block_size, depth * self.block_size)
                if copy_s < load.speed.slowness * compute_s:
                    wait_s = before.wait_s or load.reloads.wait_s(now_s)
                    part = TierBlocks(tier, depth - begin)
                    reloads[replica_id] = Reload((*before.parts, part), wait_s + copy_s)
        return reloads | self._waits(chain, hits, reloads, now_s)

    def _waits(
        self,
        chain: Sequence[Fingerprint],
        hits: Mapping[str, int],
        reloads: Mapping[str, Reload],
        now_s: float,
    ) -> dict[str, Reload]:
        """Return the waits for copies that replicas have started for earlier requests.

        A prompt waits if the last block of its hit is not in GPU memory yet.
        """
        waits = {}
        for replica_id in self._replicas.tiers.keys() & hits.keys() - reloads.keys():
            wait_s = self._loads.of(replica_id).reloads.wait_s(now_s)
            if wait_s and not self.mirror.is_held(replica_id, chain[hits[replica_id] - 1]):
                waits[replica_id] = Reload((), wait_s)
        return waits
