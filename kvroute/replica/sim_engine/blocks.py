"""A simulated paged KV cache: it takes token ids and emits KV events as vLLM does.

A block's hash is its fingerprint.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from kvroute.contract.chain import Scope, Space
from kvroute.contract.fingerprint import Fingerprint, reusable_blocks
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import Keep
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    KVEvent,
)
from kvroute.replica.sim_engine.paged_cache import PagedCache


@dataclass(slots=True, eq=False)
class Table:
    """One sequence: its tokens and the blocks that it holds for them."""

    token_ids: list[int]  # append-only
    scope: Scope
    hashes: list[Fingerprint]  # of the first full blocks; computed when needed
    blocks: list[int] = field(default_factory=list)  # held, in order
    cached: int = 0  # leading blocks that are full and cached under their hash


class BlockPool:
    """The blocks of one engine, and the events about them."""

    def __init__(
        self,
        *,
        model: str,
        revision: str = "",
        block_size: int,
        capacity_blocks: int,
        prefix_caching: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._space = Space(model, revision, block_size)
        self.block_size = block_size
        self.capacity_blocks = capacity_blocks
        self.prefix_caching = prefix_caching
        self._events: list[KVEvent] = []
        self._cache = PagedCache(
            capacity_blocks, lambda hash_: self._events.append(BlockRemoved([hash_])), clock
        )

    @property
    def free_blocks(self) -> int:
        return len(self._cache.free)

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - self.free_blocks

    def copies(self) -> dict[BlockHash, int]:
        """How many blocks are cached under each hash."""
        return dict(self._cache.copies())

    def table(self, token_ids: TokenIds, scope: Scope) -> Table:
        """A table without blocks."""
        return Table(token_ids.tolist(), scope, self._space.chain(token_ids, scope))

    def admit(self, table: Table) -> int | None:
        """Gives cached blocks to an empty table and returns their number. While the pool has no
        room for all its tokens, it changes nothing and returns None."""
        tokens = len(table.token_ids)
        reusable = table.hashes[: reusable_blocks(tokens, self.block_size)]
        hits = self._cache.admit(reusable, self._blocks_for(tokens))
        if hits is None:
            return None
        table.blocks = hits
        table.cached = len(hits)
        return len(hits)

    def extend(self, table: Table, tokens: int) -> bool:
        """Holds blocks for the first `tokens` tokens and caches the full ones. While too few blocks
        are free, it changes nothing and returns False."""
        missing = self._blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        table.blocks += self._cache.take(missing)
        if self.prefix_caching:
            self._store(table, tokens // self.block_size)
        return True

    def forget(self, table: Table, computed: int) -> None:
        """Of the table's cached blocks, those that have no KV: only `computed` tokens have."""
        first = computed // self.block_size
        self._cache.forget(table.blocks[first : table.cached])
        table.cached = min(table.cached, first)

    def free(self, table: Table, keep: Keep | None = None) -> None:
        """Releases all blocks of the table; `keep` is what its request says of them at its end."""
        self._cache.release(table.blocks, keep)
        table.blocks = []
        table.cached = 0

    def end_session(self, session: int) -> None:
        """Its blocks are evicted first."""
        self._cache.end(session)

    def share(self, table: Table, blocks: int) -> Table:
        """A new table that also holds the first blocks of this one; they must be cached."""
        held = table.blocks[:blocks]
        self._cache.hold(held)
        tokens = table.token_ids[: blocks * self.block_size]
        hashes = table.hashes[:blocks]
        return Table(tokens, table.scope, hashes, held, cached=blocks)

    def reset(self) -> bool:
        """Clears all cached blocks. While a block is held, it clears nothing and returns False."""
        if self.used_blocks:
            return False
        self._cache.clear()
        if self.prefix_caching:
            self._events.append(AllBlocksCleared())
        return True

    def emit_held(self) -> None:
        """Adds an event with all cached blocks."""
        if self.prefix_caching:
            self._events.append(BlocksHeld([self.copies()]))

    def drain(self) -> list[KVEvent]:
        """The events since the last call, in order."""
        events, self._events = self._events, []
        if evictions := self._cache.free.idle.evictions():
            events.append(evictions)
        return events

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _store(self, table: Table, full_blocks: int) -> None:
        """Caches the table's first full_blocks blocks under their hashes."""
        first = table.cached
        if first >= full_blocks:
            return
        self._complete(table, full_blocks)
        hashes = table.hashes[first:full_blocks]
        for block, hash_ in zip(table.blocks[first:full_blocks], hashes, strict=True):
            self._cache.store(block, hash_)
        table.cached = full_blocks
        self._events.append(BlockStored(hashes, hashes))

    def _complete(self, table: Table, full_blocks: int) -> None:
        """Computes the missing hashes of the table's first full_blocks blocks."""
        known = len(table.hashes)
        if known >= full_blocks:
            return
        tokens = table.token_ids[known * self.block_size : full_blocks * self.block_size]
        ids = np.array(tokens, dtype=np.uint32)
        table.hashes += self._space.chain(ids, table.scope, before=table.hashes)
