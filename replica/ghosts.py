"""Estimates the additional hits of a larger cache, from the events of the real cache.

A ghost list has the hashes of the blocks that were evicted last, as many as the cache holds. If a
block is stored again while it is in the list, it was evicted too early. The number of blocks that
were evicted after it shows how much larger the cache would have to be (Mattson et al., Evaluation
techniques for storage hierarchies, 1970).

The estimate is rather low, for two reasons. Evictions by an earlier chunk of a prompt make ghosts
older than they were when the prompt arrived. Blocks that another replica computes again are not
seen. On the other hand, the blocks of an answer that is generated again, word by word, count too.
"""

from collections import Counter, OrderedDict
from collections.abc import Container, Iterable, Mapping, Sequence
from itertools import accumulate, pairwise

from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventsLost,
    KVEvent,
)
from kvroute.replica.engine.protocol import Engine

SIZES = {"1.25": 1.25, "1.5": 1.5, "2": 2.0}  # name -> size as a multiple of the real cache's


class Ghosts:
    """The ghost list of one engine.

    The list has one part for each size. The first part has the blocks that a cache of the first
    size would still have, the next part has the further blocks that a cache of the second size
    would still have, and so on.
    """

    def __init__(
        self,
        capacity_blocks: int,
        block_tokens: int,
        group: int | None = 0,
        in_host: Container[BlockHash] = (),
    ) -> None:
        """Create an empty list.

        Args:
            capacity_blocks: The number of blocks that the real cache has room for.
            block_tokens: The number of tokens in a block.
            group: The number of the KV cache group whose events count.
            in_host: The blocks in host memory. They are copied to the engine, not computed.
        """
        self._in_host = in_host
        self._block_tokens = block_tokens
        self._group = group
        # The parts; in each part, the block that was evicted first comes first.
        self._parts = [OrderedDict[BlockHash, None]() for _ in SIZES]
        self._limits = [
            round(capacity_blocks * (b - a)) for a, b in pairwise((1.0, *SIZES.values()))
        ]
        # Limit of the first part between two stores, which move its oldest blocks to other parts.
        self._most = 2 * capacity_blocks
        self._copies = Counter[BlockHash]()  # number of cached blocks under each hash
        # Number of stored blocks, by the smallest size that would have had them. The last number
        # counts the blocks that no size would have had.
        self._found = [0] * (len(SIZES) + 1)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def hit_tokens(self) -> Mapping[str, int]:
        """Return the tokens that a cache of each size would have had and the real one had not."""
        totals = accumulate(self._found[:-1])
        return {
            size: blocks * self._block_tokens for size, blocks in zip(SIZES, totals, strict=True)
        }

    def record_events(self, events: Iterable[KVEvent]) -> None:
        """Record changes of the engine's cache, in order."""
        for event in events:
            match event:
                case BlockRemoved() if event.group == self._group:
                    self._evict(event.block_hashes)
                case BlockStored() if event.group == self._group:
                    self._store(event.block_hashes)
                    self._age()
                case AllBlocksCleared() | EventsLost():
                    self._clear()
                case _:
                    pass

    def _evict(self, block_hashes: Sequence[BlockHash]) -> None:
        """Add evicted blocks to the list, except those that have another copy in the cache."""
        youngest = self._parts[0]
        for block_hash in block_hashes:
            if self._copies[block_hash] > 1:
                self._copies[block_hash] -= 1
                continue
            del self._copies[block_hash]
            self._take(block_hash)
            youngest[block_hash] = None
            if len(youngest) > self._most:
                self._age()

    def _store(self, block_hashes: Sequence[BlockHash]) -> None:
        """Count stored blocks that a larger cache would have had, and remove them from the list.

        A hit needs all blocks before it, so a block counts for the largest size that any block
        before it needs. Blocks that were evicted to make room for these do not count as younger.
        """
        reached = 0
        for block_hash in block_hashes:
            reached = max(reached, self._take(block_hash))
            if block_hash not in self._in_host:
                self._found[reached] += 1
            self._copies[block_hash] += 1

    def _take(self, block_hash: BlockHash) -> int:
        """Remove a block from the list; return the number of the part that had it."""
        for number, part in enumerate(self._parts):
            if block_hash in part:
                del part[block_hash]
                return number
        return len(self._parts)

    def _age(self) -> None:
        """Move the oldest blocks of each part that is too long to the next part.

        The last part drops them.
        """
        for part, older, limit in zip(
            self._parts, (*self._parts[1:], None), self._limits, strict=True
        ):
            while len(part) > limit:
                oldest, _ = part.popitem(last=False)
                if older is not None:
                    older[oldest] = None

    def _clear(self) -> None:
        for part in self._parts:
            part.clear()
        self._copies.clear()


def ghosts_of(engine: Engine, table: BlockTable) -> Ghosts:
    """Return a ghost list for the first entry of the engine's layout.

    That entry is full attention if the model has any. The other groups have as many blocks or
    fewer, and their blocks are evicted together with these.
    """
    facts, members = engine.facts, list(engine.members)
    tokens = facts.layout.groups[0].block_tokens if facts.layout else facts.block_size
    capacity_blocks = facts.capacity_blocks * facts.block_size // tokens
    group = members.index(0) if 0 in members else None
    return Ghosts(capacity_blocks, tokens, group, table.in_host)
