"""The block tables of sequences in a modelled engine, and the pool that their blocks are from."""

from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint, reusable_blocks
from kvroute.contract.keep import RetentionHint
from kvroute.replica.modelled.paged_cache import PagedCache


class SequenceTable:
    """The block table of one sequence. Subclasses know its length, and have these attributes."""

    hashes: list[Fingerprint]  # hashes of the first full blocks; more are computed when needed
    blocks: list[int]  # held blocks, in the order of the tokens
    cached: int  # number of leading blocks that are full and cached under their hash

    @property
    def length(self) -> int:
        """Return the number of tokens: of the prompt, and of the answer so far."""
        raise NotImplementedError


class TablePool:
    """The blocks of a modelled engine's KV cache, which tables hold as in vLLM."""

    def __init__(self, capacity_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.capacity_blocks = capacity_blocks
        self.cache = PagedCache(capacity_blocks, self.evicted)

    def evicted(self, hash_: Fingerprint) -> None:
        """Record that a block was evicted, after the fact."""

    def stored(self, hashes: Sequence[Fingerprint]) -> None:
        """Record that blocks are about to be cached under these hashes."""

    def complete(self, table: SequenceTable, full_blocks: int) -> None:
        """Compute the missing hashes of the table's first `full_blocks` blocks."""
        raise NotImplementedError

    @property
    def free_blocks(self) -> int:
        return len(self.cache.free)

    @property
    def used_blocks(self) -> int:
        return self.capacity_blocks - self.free_blocks

    def reusable(self, table: SequenceTable) -> list[Fingerprint]:
        """Return the blocks that a cache can provide; the last token is always computed."""
        return table.hashes[: reusable_blocks(table.length, self.block_size)]

    def admit(self, table: SequenceTable) -> int | None:
        """Let an empty table hold the cached blocks of its tokens, and return their number.

        If the pool has too few free blocks for all tokens of the table, change nothing and return
        None.
        """
        hits = self.cache.admit(self.reusable(table), self._blocks_for(table.length))
        if hits is None:
            return None
        table.blocks = hits
        table.cached = len(hits)
        return len(hits)

    def has_space(self, table: SequenceTable) -> bool:
        """Return whether `admit` would admit the table now."""
        return self.cache.has_space(self.reusable(table), self._blocks_for(table.length))

    def hold(self, table: SequenceTable, blocks: int) -> None:
        """Let the table hold this many blocks more, which must be free."""
        table.blocks += self.cache.take(blocks)

    def extend(self, table: SequenceTable, tokens: int) -> bool:
        """Hold blocks for the first `tokens` tokens, and cache the full ones.

        As in vLLM, blocks are cached before the step computes them, so that another sequence in the
        same step can reuse them. If too few blocks are free, change nothing and return False.
        """
        missing = self._blocks_for(tokens) - len(table.blocks)
        if missing > self.free_blocks:
            return False
        if missing > 0:
            self.hold(table, missing)
        self.store(table, tokens // self.block_size)
        return True

    def store(self, table: SequenceTable, full_blocks: int) -> None:
        """Cache the table's first `full_blocks` blocks under their hashes."""
        first = table.cached
        if first >= full_blocks:
            return
        self.complete(table, full_blocks)
        hashes = table.hashes[first:full_blocks]
        self.stored(hashes)
        for block, hash_ in zip(table.blocks[first:full_blocks], hashes, strict=True):
            self.cache.store(block, hash_)
        table.cached = full_blocks

    def forget(self, table: SequenceTable, computed: int) -> None:
        """Remove the table's blocks after its first `computed` tokens from the cache.

        The KV in these blocks was never computed. The blocks stay held.
        """
        first = computed // self.block_size
        self.cache.forget(table.blocks[first : table.cached])
        table.cached = min(table.cached, first)

    def free(self, table: SequenceTable, hint: RetentionHint | None = None) -> None:
        """Release all blocks of the table.

        Args:
            table: A sequence's table.
            hint: The new retention of the blocks. None: keep the old one, for example because the
                request was preempted.
        """
        self.cache.release(table.blocks, hint)
        table.blocks = []
        table.cached = 0

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)
