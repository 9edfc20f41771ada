"""A paged KV cache without the KV: which blocks are held, cached and reused, as in vLLM."""

from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np

from replica.events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    KVEvent,
)
from replica.kvindex.fingerprint import Fingerprint, fingerprints, reusable_blocks, root
from replica.protocol import TokenIds


@dataclass(slots=True, eq=False)
class Table:
    """One sequence: its tokens and the blocks that it holds for them."""

    token_ids: list[int]  # may grow; what is there never changes
    namespace: str
    lora: str
    hashes: list[Fingerprint]  # of the first full blocks; as many as were needed so far
    blocks: list[int] = field(default_factory=list)  # held, in order
    cached: int = 0  # leading blocks that are full, and cached under their hash


class BlockPool:
    """Blocks that are held, idle (free, but cached until reused) or blank (free, worth nothing)."""

    def __init__(
        self, *, block_size: int, capacity_blocks: int, prefix_caching: bool = True
    ) -> None:
        self.block_size = block_size
        self.capacity_blocks = capacity_blocks
        self.prefix_caching = prefix_caching
        self._holders = [0] * capacity_blocks  # sequences that hold each block
        self._hash_of: dict[int, Fingerprint] = {}  # block -> hash
        # A hash can have many blocks: equal ones are not merged, since both are in use already.
        self._blocks_of: dict[Fingerprint, list[int]] = {}
        self._blank = list(range(capacity_blocks))
        self._idle: OrderedDict[int, None] = OrderedDict()  # the next to be reused comes first
        self._events: list[KVEvent] = []

    @property
    def free_blocks(self) -> int:
        return len(self._blank) + len(self._idle)

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - self.free_blocks

    def copies(self) -> dict[BlockHash, int]:
        """How many blocks are cached under each hash."""
        return {hash_: len(blocks) for hash_, blocks in self._blocks_of.items()}

    def table(self, token_ids: TokenIds, namespace: str, lora: str = "") -> Table:
        """A table that holds no block yet. Blocks are shared within one namespace and adapter."""
        parent = root(model="", block_size=self.block_size, lora=lora, namespace=namespace)
        hashes = fingerprints(token_ids, block_size=self.block_size, parent=parent)
        return Table(token_ids.tolist(), namespace, lora, hashes)

    def admit(self, table: Table) -> int | None:
        """The cached blocks that an empty table now holds; None, and it holds none, while the pool
        has no room for all its tokens."""
        hits = self._hits(table)
        idle_hits = sum(self._holders[block] == 0 for block in hits)
        if self._blocks_for(len(table.token_ids)) - len(hits) + idle_hits > self.free_blocks:
            return None
        for block in hits:
            self._hold(block)
        table.blocks = hits
        table.cached = len(hits)
        return len(hits)

    def extend(self, table: Table, tokens: int) -> bool:
        """Holds blocks for the first `tokens` tokens and caches the full ones; False, and nothing
        has changed, while too few blocks are free."""
        missing = self._blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        table.blocks += [self._take() for _ in range(missing)]
        if self.prefix_caching:
            self._cache(table, tokens // self.block_size)
        return True

    def free(self, table: Table) -> None:
        """The table holds nothing. Its last blocks are reused first: prefixes outlive leaves."""
        for block in reversed(table.blocks):
            self._release(block)
        table.blocks = []
        table.cached = 0

    def share(self, table: Table, blocks: int) -> Table:
        """Another table, which holds the first blocks of this one; they must be cached."""
        held = table.blocks[:blocks]
        for block in held:
            self._hold(block)
        tokens = table.token_ids[: blocks * self.block_size]
        hashes = table.hashes[:blocks]
        return Table(tokens, table.namespace, table.lora, hashes, held, cached=blocks)

    def reset(self) -> bool:
        """Forgets every cached block; False, and nothing is forgotten, while a block is held."""
        if self.used_blocks:
            return False
        self._blank += self._idle
        self._idle.clear()
        self._hash_of.clear()
        self._blocks_of.clear()
        if self.prefix_caching:
            self._events.append(AllBlocksCleared())
        return True

    def tell_held(self) -> None:
        """What is cached now becomes the next event."""
        if self.prefix_caching:
            self._events.append(BlocksHeld(self.copies()))

    def drain(self) -> list[KVEvent]:
        """What happened since the last call, in order."""
        events, self._events = self._events, []
        return events

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _hits(self, table: Table) -> list[int]:
        limit = reusable_blocks(len(table.token_ids), self.block_size)
        hits: list[int] = []
        for hash_ in table.hashes[:limit]:
            same = self._blocks_of.get(hash_)
            if same is None:
                break
            hits.append(same[0])
        return hits

    def _hold(self, block: int) -> None:
        self._idle.pop(block, None)
        self._holders[block] += 1

    def _take(self) -> int:
        if self._blank:
            block = self._blank.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _forget(self, block: int) -> None:
        hash_ = self._hash_of.pop(block)
        same = self._blocks_of[hash_]
        same.remove(block)
        if not same:
            del self._blocks_of[hash_]
        self._events.append(BlockRemoved([hash_]))

    def _release(self, block: int) -> None:
        self._holders[block] -= 1
        if self._holders[block]:
            return
        if block in self._hash_of:
            self._idle[block] = None
        else:
            self._blank.append(block)

    def _cache(self, table: Table, full_blocks: int) -> None:
        """The table's first full_blocks blocks can be found by their hashes."""
        first = table.cached
        if first >= full_blocks:
            return
        self._complete(table, full_blocks)
        for block, hash_ in zip(
            table.blocks[first:full_blocks], table.hashes[first:full_blocks], strict=True
        ):
            self._hash_of[block] = hash_
            self._blocks_of.setdefault(hash_, []).append(block)
        table.cached = full_blocks
        self._events.append(self._stored(table, first))

    def _complete(self, table: Table, full_blocks: int) -> None:
        """The table has a hash for each of its first full_blocks blocks."""
        known = len(table.hashes)
        if known >= full_blocks:
            return
        tokens = table.token_ids[known * self.block_size : full_blocks * self.block_size]
        table.hashes += fingerprints(
            np.array(tokens, dtype=np.uint32),
            block_size=self.block_size,
            parent=self._parent(table, known),
        )

    def _parent(self, table: Table, block: int) -> Fingerprint:
        if block:
            return table.hashes[block - 1]
        return root(
            model="",
            block_size=self.block_size,
            lora=table.lora,
            namespace=table.namespace,
        )

    def _stored(self, table: Table, first: int) -> BlockStored:
        """The event that tells of the blocks from the first to the last cached one."""
        size = self.block_size
        return BlockStored(
            block_hashes=table.hashes[first : table.cached],
            parent=table.hashes[first - 1] if first else None,
            token_ids=table.token_ids[first * size : table.cached * size],
            namespace="" if first else table.namespace,
            lora=table.lora,
        )
