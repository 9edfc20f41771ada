"""A simulated paged KV cache that emits the KV events that vLLM would emit for the same tokens.

Unlike in vLLM, the hash of a block is its fingerprint.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Fingerprint
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
from kvroute.replica.modelled.host_cache import HostCache
from kvroute.replica.modelled.table_pool import SequenceTable, TablePool


@dataclass(eq=False)
class Table(SequenceTable):
    """The block table of one sequence: its tokens, and the blocks that it holds for them."""

    token_ids: list[int]  # append-only
    scope: Scope
    hashes: list[Fingerprint]
    blocks: list[int] = field(default_factory=list)
    cached: int = 0
    written: int = 0  # number of leading blocks that have been copied to host memory

    @property
    def length(self) -> int:
        return len(self.token_ids)


NO_TRANSFERS = Transfers()
HOST = 1  # group number of blocks in host memory, in events


class BlockPool(TablePool):
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
        super().__init__(capacity_blocks, block_size)
        self._space = Space(model, revision, block_size)
        self.prefix_caching = prefix_caching
        self._events: list[KVEvent] = []
        self._tier = host
        self._host = HostCache(host.blocks) if host else None
        self._reloading = set[Fingerprint]()  # blocks that are being copied from host memory
        self._transfers = NO_TRANSFERS

    def evicted(self, hash_: Fingerprint) -> None:
        self._events.append(BlockRemoved([hash_]))

    def stored(self, hashes: Sequence[Fingerprint]) -> None:
        self._events.append(BlockStored(hashes, hashes))

    def complete(self, table: SequenceTable, full_blocks: int) -> None:
        assert isinstance(table, Table)
        first = len(table.hashes)
        if first >= full_blocks:
            return
        tokens = table.token_ids[first * self.block_size : full_blocks * self.block_size]
        ids = np.array(tokens, dtype=np.uint32)
        table.hashes += self._space.chain(ids, table.scope, before=table.hashes)

    def store(self, table: SequenceTable, full_blocks: int) -> None:
        if self.prefix_caching:
            super().store(table, full_blocks)

    def copies(self) -> dict[BlockHash, int]:
        """Return the number of blocks cached under each hash."""
        return dict(self.cache.copies())

    def table(self, token_ids: TokenIds, scope: Scope) -> Table:
        """Return a new block table that holds no blocks yet."""
        return Table(token_ids.tolist(), scope, self._space.chain(token_ids, scope))

    def hits_in_host(self, table: Table) -> int:
        """Return how many of the prompt's next blocks, after the table's, are in host memory.

        The table must be admitted.
        """
        return self._host.hits(self.reusable(table), len(table.blocks)) if self._host else 0

    def is_reloading(self, table: Table) -> bool:
        """Return whether the prompt's first missing block is being copied from host memory.

        The copy was started for another table.
        """
        if not self._reloading:
            return False
        missing = (hash_ for hash_ in self.reusable(table) if hash_ not in self.cache)
        return next(missing, None) in self._reloading

    def begin_reload(self, table: Table, blocks: int) -> None:
        """Let the table hold `blocks` more blocks. Their copy from host memory begins now."""
        assert self._host is not None
        end = len(table.blocks) + blocks
        self._reloading.update(table.hashes[len(table.blocks) : end])
        self._host.use(table.hashes[:end])
        self.hold(table, blocks)

    def end_reload(self, table: Table) -> None:
        """Cache the copied blocks of a table, after their copy from host memory has ended."""
        assert self._tier is not None
        blocks = len(table.blocks) - table.cached
        self._reloading.difference_update(table.hashes[table.cached : len(table.blocks)])
        self.store(table, len(table.blocks))
        before, size = self._transfers, blocks * self._tier.block_bytes
        self._transfers = replace(
            before,
            reloaded_tokens=before.reloaded_tokens + blocks * self.block_size,
            in_bytes=before.in_bytes + size,
            in_s=before.in_s + self._tier.reload_s(blocks),
        )

    def drop_reload(self, table: Table) -> None:
        """Forget the copy to a table's blocks, because its request was aborted during it."""
        self._reloading.difference_update(table.hashes[table.cached : len(table.blocks)])

    def write_through(self, table: Table, computed: int) -> None:
        """Copy the cached blocks of the first `computed` tokens to host memory."""
        full = min(computed // self.block_size, table.cached)
        if self._host is None or full <= table.written:
            return
        table.written = full
        if added := self._store_in_host(table.hashes[:full]):
            self._count_out(added)

    def free(self, table: SequenceTable, hint: RetentionHint | None = None) -> None:
        assert isinstance(table, Table)
        if self._host is not None and hint is not None:
            self._host.use(table.hashes[: table.cached], hint)
        table.written = 0
        super().free(table, hint)

    def end_session(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self.cache.end(session)
        if self._host is not None:
            self._host.end(session)

    def share(self, table: Table, blocks: int) -> Table:
        """Return a new table that also holds the first `blocks` blocks of this table.

        These blocks must be cached.
        """
        held = table.blocks[:blocks]
        self.cache.hold(held)
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
        self.cache.clear()
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
