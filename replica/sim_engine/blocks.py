"""A simulated paged KV cache that emits the KV events that vLLM would emit for the same tokens.

Unlike in vLLM, the hash of a block is its fingerprint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, reusable_blocks
from kvroute.contract.generation import TokenIds
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import TierFacts
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    KVEvent,
    Transfers,
)
from kvroute.replica.sim_engine.host_cache import HostCache
from kvroute.replica.sim_engine.paged_cache import PagedCache


@dataclass(slots=True, eq=False)
class Table:
    """The block table of one sequence: its tokens, and the blocks that it holds for them."""

    token_ids: list[int]  # append-only
    scope: Scope
    hashes: list[Fingerprint]  # hashes of the first full blocks; more are computed when needed
    blocks: list[int] = field(default_factory=list)  # held blocks, in the order of the tokens
    cached: int = 0  # number of leading blocks that are full and cached under their hash
    written: int = 0  # number of leading blocks that have been copied to host memory


NO_TRANSFERS = Transfers()
HOST = 1  # group number of blocks in host memory, in events


class BlockPool:
    """The KV cache of one engine, and its events."""

    def __init__(
        self,
        *,
        model: str,
        revision: str = "",
        block_size: int,
        capacity_blocks: int,
        prefix_caching: bool = True,
        host: TierFacts | None = None,
    ) -> None:
        self._space = Space(model, revision, block_size)
        self.block_size = block_size
        self.capacity_blocks = capacity_blocks
        self.prefix_caching = prefix_caching
        self._events: list[KVEvent] = []
        self._cache = PagedCache(
            capacity_blocks, lambda hash_: self._events.append(BlockRemoved([hash_]))
        )
        self._tier = host
        self._host = HostCache(host.blocks) if host else None
        self._reloading = set[Fingerprint]()  # blocks that are being copied from host memory
        self._transfers = NO_TRANSFERS

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - len(self._cache.free)

    def copies(self) -> dict[BlockHash, int]:
        """Return the number of blocks cached under each hash."""
        return dict(self._cache.copies())

    def table(self, token_ids: TokenIds, scope: Scope) -> Table:
        """Return a new block table that holds no blocks yet."""
        return Table(token_ids.tolist(), scope, self._space.chain(token_ids, scope))

    def admit(self, table: Table) -> int | None:
        """Let an empty table hold the cached blocks of its prompt, and return their number.

        If the pool has too few free blocks for all tokens of the table, change nothing and return
        None.
        """
        hits = self._cache.admit(self._reusable(table), self._blocks_for(len(table.token_ids)))
        if hits is None:
            return None
        table.blocks = hits
        table.cached = len(hits)
        return len(hits)

    def has_space(self, table: Table) -> bool:
        """Return whether `admit` would admit the table now."""
        return self._cache.has_space(self._reusable(table), self._blocks_for(len(table.token_ids)))

    def extend(self, table: Table, tokens: int) -> bool:
        """Hold blocks for the first `tokens` tokens, and cache the full ones.

        If too few blocks are free, change nothing and return False.
        """
        missing = self._blocks_for(tokens) - len(table.blocks)
        if missing > len(self._cache.free):
            return False
        table.blocks += self._cache.take(missing)
        if self.prefix_caching:
            self._store(table, tokens // self.block_size)
        return True

    def hits_in_host(self, table: Table) -> int:
        """Return how many of the prompt's next blocks, after the table's, are in host memory.

        The table must be admitted.
        """
        return self._host.hits(self._reusable(table), len(table.blocks)) if self._host else 0

    def is_reloading(self, table: Table) -> bool:
        """Return whether the prompt's first missing block is being copied from host memory.

        The copy was started for another table.
        """
        if not self._reloading:
            return False
        missing = (hash_ for hash_ in self._reusable(table) if hash_ not in self._cache)
        return next(missing, None) in self._reloading

    def begin_reload(self, table: Table, blocks: int) -> None:
        """Let the table hold `blocks` more blocks. Their copy from host memory begins now."""
        assert self._host is not None
        end = len(table.blocks) + blocks
        self._reloading.update(table.hashes[len(table.blocks) : end])
        self._host.use(table.hashes[:end])
        table.blocks += self._cache.take(blocks)

    def end_reload(self, table: Table) -> None:
        """Cache the copied blocks of a table, after their copy from host memory has ended."""
        assert self._tier is not None
        blocks = len(table.blocks) - table.cached
        self._reloading.difference_update(table.hashes[table.cached : len(table.blocks)])
        self._store(table, len(table.blocks))
        before, size = self._transfers, blocks * self._tier.block_bytes
        self._transfers = replace(
            before,
            reloaded_tokens=before.reloaded_tokens + blocks * self.block_size,
            in_bytes=before.in_bytes + size,
            in_s=before.in_s + self._tier.reload_s(blocks),
        )

    def drop_reload(self, table: Table) -> None:
        """Free a table's blocks, because its request was aborted during the copy to them."""
        self._reloading.difference_update(table.hashes[table.cached : len(table.blocks)])
        self.free(table)

    def write_through(self, table: Table, computed: int) -> None:
        """Copy the cached blocks of the first `computed` tokens to host memory."""
        full = min(computed // self.block_size, table.cached)
        if self._host is None or full <= table.written:
            return
        table.written = full
        if added := self._store_in_host(table.hashes[:full]):
            self._count_out(added)

    def forget(self, table: Table, computed: int) -> None:
        """Remove the table's blocks after its first `computed` tokens from the cache.

        The KV in these blocks was never computed. The blocks stay held.
        """
        first = computed // self.block_size
        self._cache.forget(table.blocks[first : table.cached])
        table.cached = min(table.cached, first)

    def free(self, table: Table, hint: RetentionHint | None = None) -> None:
        """Release all blocks of the table.

        Args:
            table: A sequence's table.
            hint: The new retention of the blocks. None: keep the old one, for example because the
                request was preempted.
        """
        self._cache.release(table.blocks, hint)
        if self._host is not None and hint is not None:
            self._host.use(table.hashes[: table.cached], hint)
        table.blocks = []
        table.cached = table.written = 0

    def end_session(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self._cache.end(session)
        if self._host is not None:
            self._host.end(session)

    def share(self, table: Table, blocks: int) -> Table:
        """Return a new table that also holds the first `blocks` blocks of this table.

        These blocks must be cached.
        """
        held = table.blocks[:blocks]
        self._cache.hold(held)
        tokens = table.token_ids[: blocks * self.block_size]
        hashes = table.hashes[:blocks]
        return Table(tokens, table.scope, hashes, held, cached=blocks)

    def pin_in_host(self, name: str, hashes: Sequence[Fingerprint]) -> None:
        """Replace the blocks of a pin in host memory. Without any blocks, the pin is removed."""
        if self._host is not None:
            self._host.pin(name, hashes)

    def reset(self) -> bool:
        """Clear all cached blocks and return True.

        If a sequence holds a block, clear nothing and return False.
        """
        if self.used_blocks:
            return False
        self._cache.clear()
        if self._host is not None:
            self._host.clear()
        if self.prefix_caching:
            self._events.append(AllBlocksCleared())
        return True

    def emit_held(self) -> None:
        """Emit an event with all cached blocks."""
        if self.prefix_caching:
            copies = [self.copies()]
            if self._host is not None:
                copies.append(dict.fromkeys(self._host, 1))
            self._events.append(BlocksHeld(copies))

    def drain(self) -> list[KVEvent]:
        """Return the events since the last call, in order."""
        events, self._events = self._events, []
        if self._transfers != NO_TRANSFERS:
            events.append(self._transfers)
            self._transfers = NO_TRANSFERS
        return events

    def _reusable(self, table: Table) -> list[Fingerprint]:
        return table.hashes[: reusable_blocks(len(table.token_ids), self.block_size)]

    def _store_in_host(self, hashes: Sequence[Fingerprint]) -> int:
        """Store blocks of a prompt in host memory, and return the number of new ones."""
        assert self._host is not None
        added, dropped = self._host.store(hashes)
        if dropped:
            self._events.append(BlockRemoved(dropped, HOST))
        if added:
            self._events.append(BlockStored(added, added, HOST))
        return len(added)

    def _count_out(self, blocks: int) -> None:
        """Count a copy of blocks to host memory."""
        assert self._tier is not None
        before = self._transfers
        self._transfers = replace(
            before,
            out_bytes=before.out_bytes + blocks * self._tier.block_bytes,
            out_s=before.out_s + self._tier.reload_s(blocks),
        )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _store(self, table: Table, full_blocks: int) -> None:
        """Cache the table's first `full_blocks` blocks under their hashes."""
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
        """Compute the missing hashes of the table's first `full_blocks` blocks."""
        first = len(table.hashes)
        if first >= full_blocks:
            return
        tokens = table.token_ids[first * self.block_size : full_blocks * self.block_size]
        ids = np.array(tokens, dtype=np.uint32)
        table.hashes += self._space.chain(ids, table.scope, before=table.hashes)
