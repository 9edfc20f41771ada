"""What a larger cache would have found besides, by the events of the one that there is.

A ghost list has the blocks that were evicted last, as many as the cache holds. A block that is
stored again while it is a ghost was evicted too early. How many ghosts are younger says how much
larger the cache had to be (Mattson et al., Evaluation techniques for storage hierarchies, 1970).

It is an estimate, and rather low. Evictions by an earlier chunk of the same prompt make ghosts
older than they were when the prompt came, and what another replica computes again is not seen. An
answer that is generated again, word by word, counts like a prompt.
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

SIZES = {"1.25": 1.25, "1.5": 1.5, "2": 2.0}  # of caches, over the one that there is; by name


class Ghosts:
    """The ghost list of one engine, in parts: the first has those that a cache the first size would
    still have, the next those that only one of the second would, and so on.

    group: the one that is followed, of the engine's KV cache groups. capacity_blocks: what it has
    room for. block_tokens: in one of its blocks. in_host: the blocks that host memory has; they
    are copied, not computed.
    """

    def __init__(
        self,
        capacity_blocks: int,
        block_tokens: int,
        group: int | None = 0,
        in_host: Container[BlockHash] = (),
    ) -> None:
        self._in_host = in_host
        self._block_tokens = block_tokens
        self._group = group
        self._parts = [OrderedDict[BlockHash, None]() for _ in SIZES]  # each: the oldest first
        self._limits = [
            round(capacity_blocks * (b - a)) for a, b in pairwise((1.0, *SIZES.values()))
        ]
        self._most = 2 * capacity_blocks  # ghosts, until the oldest go though nothing was stored
        self._copies = Counter[BlockHash]()  # blocks of the cache under each hash
        self._found = [0] * (len(SIZES) + 1)  # blocks, by the first size that would have had them

    def __len__(self) -> int:
        return sum(map(len, self._parts))

    @property
    def hit_tokens(self) -> Mapping[str, int]:
        """Tokens that a cache of each size would have found, and the real one did not."""
        found = accumulate(self._found[:-1])
        return {
            size: blocks * self._block_tokens for size, blocks in zip(SIZES, found, strict=True)
        }

    def happened(self, events: Iterable[KVEvent]) -> None:
        """Takes in changes of the engine's cache, in order."""
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
        """A block that has another copy is not missed."""
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
        """Counts the leading ghosts: what lies behind a miss no cache could have delivered. What
        was evicted for these very blocks has not yet made the others older."""
        reached = 0
        for block_hash in block_hashes:
            reached = max(reached, self._take(block_hash))
            if block_hash not in self._in_host:
                self._found[reached] += 1
            self._copies[block_hash] += 1

    def _take(self, block_hash: BlockHash) -> int:
        """The part that had the block, which is a ghost no longer."""
        for number, part in enumerate(self._parts):
            if block_hash in part:
                del part[block_hash]
                return number
        return len(self._parts)

    def _age(self) -> None:
        """The oldest of each part that is too long go on to the next, and from the last away."""
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
    """Of the first entry of the engine's layout, which is full attention if it has any; the other
    groups' blocks are as many or fewer, and are evicted with these."""
    facts, members = engine.facts, list(engine.members)
    tokens = facts.layout.groups[0].block_tokens if facts.layout else facts.block_size
    capacity_blocks = facts.capacity_blocks * facts.block_size // tokens
    group = members.index(0) if 0 in members else None
    return Ghosts(capacity_blocks, tokens, group, table.in_host)
