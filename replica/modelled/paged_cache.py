"""A paged KV cache that holds, caches and evicts blocks as vLLM does.

It works with hashes and not with tokens. The simulated engine and the engine model of
`kvroute replay` both use it.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.retention import IdleBlocks


class FreeBlocks:
    """The blocks that no sequence holds, in the order in which they are allocated.

    Blocks without a hash, which cache nothing, come first. Cached blocks follow in the order of
    engine/retention.py.
    """

    def __init__(self, blocks: int) -> None:
        self.idle = IdleBlocks(blocks)  # cached blocks
        self._blank = list(range(blocks))  # blocks without a hash

    def __len__(self) -> int:
        return len(self._blank) + len(self.idle)

    @property
    def blank(self) -> int:
        """Return the number of blocks that can be allocated without an eviction."""
        return len(self._blank)

    def __iter__(self) -> Iterator[int]:
        yield from self._blank
        yield from self.idle

    def put(self, blank: Sequence[int], cached: Sequence[int]) -> None:
        """Add blocks that no sequence holds any more: those without a hash, and cached ones."""
        self.idle.forget(blank)
        self._blank += blank
        self.idle.put(cached)

    def pop(self, count: int) -> list[int]:
        """Remove and return the next `count` blocks. At least `count` blocks must be free."""
        blank = [self._blank.pop() for _ in range(min(count, len(self._blank)))]
        if len(blank) == count:
            return blank
        return blank + self.idle.pop(count - len(blank))

    def forget_hashes(self) -> None:
        """Remove the hashes of all cached blocks."""
        self._blank += self.idle
        self.idle.clear()


class PagedCache:
    """The blocks of a KV cache, their hashes, and how many sequences hold each of them."""

    def __init__(self, capacity_blocks: int, on_evict: Callable[[Fingerprint], None]) -> None:
        """Create an empty cache.

        Args:
            capacity_blocks: The number of blocks.
            on_evict: Is called with each block's hash after the block was evicted.
        """
        self.free = FreeBlocks(capacity_blocks)
        self._on_evict = on_evict
        self._holders = [0] * capacity_blocks  # for each block, the number of its holders
        self._hash_of: dict[int, Fingerprint] = {}  # block -> hash
        # Hash -> its blocks. Several blocks can have one hash: two sequences that compute the same
        # tokens at the same time fill two blocks.
        self._blocks_of: dict[Fingerprint, list[int]] = {}

    def __contains__(self, hash_: Fingerprint) -> bool:
        return hash_ in self._blocks_of

    def copies(self) -> Iterator[tuple[Fingerprint, int]]:
        """Yield each cached hash with the number of its blocks."""
        return ((hash_, len(blocks)) for hash_, blocks in self._blocks_of.items())

    def admit(self, hashes: Sequence[Fingerprint], blocks: int) -> list[int] | None:
        """Hold and return the cached blocks of a sequence, up to the first block that is missing.

        Args:
            hashes: The hashes of the sequence's blocks.
            blocks: The number of blocks that the sequence needs, including the cached ones.

        Returns:
            None, and no block is held, if the sequence cannot get all the blocks that it needs.
        """
        hits = self._hits(hashes)
        if self._missing(hits, blocks) > len(self.free):
            return None
        self.hold(hits)
        return hits

    def has_space(self, hashes: Sequence[Fingerprint], blocks: int) -> bool:
        """Return whether `admit` would get all blocks with these arguments."""
        return self._missing(self._hits(hashes), blocks) <= len(self.free)

    def _hits(self, hashes: Sequence[Fingerprint]) -> list[int]:
        """Return the cached blocks of a sequence, up to the first block that is missing."""
        copies = (self._blocks_of.get(hash_) for hash_ in hashes)
        return [blocks[0] for blocks in takewhile(bool, copies) if blocks]

    def _missing(self, hits: Sequence[int], blocks: int) -> int:
        """Return how many free blocks a sequence of `blocks` blocks takes: also its idle hits."""
        return blocks - sum(1 for block in hits if self._holders[block])

    def hold(self, blocks: Sequence[int]) -> None:
        """Add a holder to these blocks, which must be cached."""
        for block in blocks:
            if not self._holders[block]:
                self.free.idle.take(block)
            self._holders[block] += 1

    def take(self, count: int) -> list[int]:
        """Allocate `count` free blocks to one sequence. At least this many blocks must be free."""
        blocks = self.free.pop(count)
        for block in blocks:
            self._holders[block] = 1
            if block in self._hash_of:
                self._forget(block)
        return blocks

    def store(self, block: int, hash_: Fingerprint) -> None:
        """Cache a held block under its hash, because it is full now."""
        self._hash_of[block] = hash_
        self._blocks_of.setdefault(hash_, []).append(block)

    def forget(self, blocks: Sequence[int]) -> None:
        """Remove the hashes of held blocks from the cache. The blocks stay held."""
        for block in blocks:
            self._forget(block)

    def release(self, blocks: Sequence[int], hint: RetentionHint | None = None) -> None:
        """Remove a holder from the blocks, and set their retention if it is given.

        Among blocks with the same retention, the last block is evicted first, so that shared
        prefixes stay longer.
        """
        if hint is not None:
            self.free.idle.label(blocks, hint)
        blank: list[int] = []
        cached: list[int] = []
        for block in reversed(blocks):
            self._holders[block] -= 1
            if not self._holders[block]:
                (cached if block in self._hash_of else blank).append(block)
        self.free.put(blank, cached)

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self.free.idle.end(session)

    def clear(self) -> None:
        """Clear the cache; no block may be held."""
        self.free.forget_hashes()
        self._hash_of.clear()
        self._blocks_of.clear()

    def _forget(self, block: int) -> None:
        hash_ = self._hash_of.pop(block)
        copies = self._blocks_of[hash_]
        copies.remove(block)
        if not copies:
            del self._blocks_of[hash_]
        self._on_evict(hash_)
