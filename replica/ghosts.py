"""Estimates the additional hits of a larger cache, from the events of the real cache.

A ghost list contains the hashes of the most recently evicted blocks, as many as the cache has
blocks. If a block is stored again while its hash is in the list, a larger cache would still have
had the block. The number of blocks that were evicted after this block shows how much larger the
cache would have to be (Mattson et al., Evaluation techniques for storage hierarchies, 1970).

The estimate is too low for two reasons. First, when a long prompt is computed in chunks, the
evictions for its earlier chunks move hashes down the list before its later chunks look for them.
Second, a block that another replica computes again is not seen here. The estimate is too high for
one reason: it also counts the blocks of an answer that is generated again with the same words.
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

# Sizes of the larger caches: label value -> multiple of the real cache's size.
SIZES = {"1.25": 1.25, "1.5": 1.5, "2": 2.0}
SCALING_SIZE = "1.25"  # size of the larger cache that autoscaling asks about
HALF_LIFE_S = 300.0  # seconds after which a computed token counts half in MissedShare


class Ghosts:
    """The ghost list of one engine.

    The list has one part for each size in SIZES. The first part contains the blocks that a cache of
    the first size would still have. The second part contains the blocks that only a cache of the
    second size or larger would still have, and so on.
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
            capacity_blocks: The number of blocks of the real cache.
            block_tokens: The number of tokens in a block.
            group: The number of the KV cache group whose events count.
            in_host: The blocks in host memory. If one of them is stored again, it was copied and
                not computed, so it is not counted.
        """
        self._in_host = in_host
        self._block_tokens = block_tokens
        self._group = group
        # The parts of the list, sorted by the time of eviction: the earliest is first.
        self._parts = [OrderedDict[BlockHash, None]() for _ in SIZES]
        self._limits = [
            round(capacity_blocks * (larger - smaller))
            for smaller, larger in pairwise((1.0, *SIZES.values()))
        ]
        # Maximum length of the first part while many blocks are evicted without a BlockStored
        # event. Each BlockStored event moves the oldest blocks to the next part.
        self._max_first_part = 2 * capacity_blocks
        self._copies = Counter[BlockHash]()  # number of cached blocks under each hash
        # For each size, the number of stored blocks that only a cache of at least this size would
        # have had. The last item counts the blocks that no size would have had.
        self._hit_blocks = [0] * (len(SIZES) + 1)

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def hit_tokens(self) -> Mapping[str, int]:
        """Return, for each size, the prompt tokens that only the larger cache would have had."""
        totals = accumulate(self._hit_blocks[:-1])
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
            self._remove(block_hash)
            youngest[block_hash] = None
            if len(youngest) > self._max_first_part:
                self._age()

    def _store(self, block_hashes: Sequence[BlockHash]) -> None:
        """Count stored blocks that a larger cache would have had, and remove them from the list.

        A block is a hit only if all blocks before it are hits. So it counts for the largest size
        that it or any block before it needs. The engine has evicted other blocks to store these.
        The caller ages the list only after this, so those evictions do not affect these hits.
        """
        size_index = 0
        for block_hash in block_hashes:
            size_index = max(size_index, self._remove(block_hash))
            if block_hash not in self._in_host:
                self._hit_blocks[size_index] += 1
            self._copies[block_hash] += 1

    def _remove(self, block_hash: BlockHash) -> int:
        """Remove a block from the list, and return the index of the part that had it.

        Returns len(SIZES) if the block is not in the list.
        """
        for number, part in enumerate(self._parts):
            if block_hash in part:
                del part[block_hash]
                return number
        return len(self._parts)

    def _age(self) -> None:
        """Move the oldest blocks of each part that exceeds its limit to the next part.

        Blocks that leave the last part are dropped.
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


def make_ghosts(engine: Engine, table: BlockTable) -> Ghosts:
    """Return a ghost list for the first entry of the engine's layout.

    That entry is full attention if the model has any. Other groups have at most as many blocks, and
    their blocks are evicted together with the blocks of this entry.
    """
    facts, group_entries = engine.facts, list(engine.group_entries)
    tokens = facts.layout.groups[0].block_tokens if facts.layout else facts.block_size
    capacity_blocks = facts.capacity_blocks * facts.block_size // tokens
    group = group_entries.index(0) if 0 in group_entries else None
    return Ghosts(capacity_blocks, tokens, group, table.in_host)


class MissedShare:
    """The share of recently computed prompt tokens that a larger cache would have had.

    Autoscaling uses it to predict how much more would be computed with fewer replicas. The caller
    passes the time, in seconds of any monotonic clock.
    """

    def __init__(self, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._computed_tokens = 0  # computed prompt tokens since the last sample
        self._counted_tokens = 0  # value of the ghost list's hit_tokens at the last sample
        # Decayed sums of computed tokens, and of those that a larger cache would have had.
        self._recent_computed = self._recent_missed = 0.0
        self._sampled_s: float | None = None  # time of the last sample

    def record_computed(self, tokens: int) -> None:
        """Record the number of tokens of a prompt that the engine computed."""
        self._computed_tokens += tokens

    def share(self, now_s: float) -> float:
        """Return the share of recently computed tokens that a larger cache would have had.

        Each call takes a sample of the ghost list.
        """
        missed_tokens = self._ghosts.hit_tokens[SCALING_SIZE]
        decay = 0.5 ** ((now_s - (self._sampled_s or now_s)) / HALF_LIFE_S)
        self._recent_computed = decay * self._recent_computed + self._computed_tokens
        self._recent_missed = decay * self._recent_missed + missed_tokens - self._counted_tokens
        self._computed_tokens, self._counted_tokens = 0, missed_tokens
        self._sampled_s = now_s
        if self._recent_computed <= 0.0:
            return 0.0
        return min(1.0, self._recent_missed / self._recent_computed)
