"""The free blocks of one of vLLM's block pools, in the order of eviction of engine/retention.py.

The order of eviction depends only on the pool's queue of free blocks, so only this queue is
replaced. The pool's events, reference counts and hashes are not changed. FreeQueue has all methods
of FreeKVCacheBlockQueue that vLLM 0.32 calls.
"""

from collections.abc import Iterator, Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock

from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.retention import IdleBlocks


class FreeQueue:
    """Replaces a block pool's queue of free blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self._blocks = pool.blocks
        # Ids of free blocks without a hash, which cache nothing, as an ordered set. The last one is
        # allocated next.
        free = pool.free_block_queue.get_all_free_blocks()
        self._blank = {block.block_id: None for block in reversed(free)}
        self._idle = IdleBlocks(len(pool.blocks))  # free blocks with a hash: they are cached
        pool.free_block_queue = self

    def label(self, blocks: Sequence[KVCacheBlock], hint: RetentionHint) -> None:
        """Set the retention of a request's blocks, while the request still holds them.

        `blocks` must not contain the null block, vLLM's placeholder.
        """
        self._idle.label([block.block_id for block in blocks], hint)

    def end(self, session: int) -> None:
        """Make the blocks of an ended session the first to be evicted."""
        self._idle.end(session)

    def clear(self) -> None:
        """Move all cached blocks to the blocks without a hash: the pool has cleared its cache."""
        self._blank = dict.fromkeys([*reversed([*self._idle]), *self._blank])
        self._idle.clear()

    # Methods that vLLM calls.

    @property
    def num_free_blocks(self) -> int:
        return len(self._blank) + len(self._idle)

    def popleft(self) -> KVCacheBlock:
        return self.popleft_n(1)[0]

    def popleft_n(self, n: int) -> list[KVCacheBlock]:
        blocks, blank = self._blocks, self._blank
        ids = [blank.popitem()[0] for _ in range(min(n, len(blank)))] if blank else []
        if len(ids) < n:
            ids += self._idle.pop(n - len(ids))
        return [blocks[id_] for id_ in ids]

    def remove(self, block: KVCacheBlock) -> None:
        id_ = block.block_id
        if id_ in self._blank:
            del self._blank[id_]
        else:
            self._idle.take(id_)

    def append(self, block: KVCacheBlock) -> None:
        self.append_n([block])

    def append_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        if blocks:
            self._idle.put([block.block_id for block in blocks])

    def prepend_n(self, blocks: Sequence[KVCacheBlock]) -> None:
        ids = [block.block_id for block in reversed(blocks)]
        self._idle.forget(ids)
        self._blank.update(dict.fromkeys(ids))

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        return list(self.iter_blocks_after(None))

    def iter_blocks_after(self, cursor: KVCacheBlock | None) -> Iterator[KVCacheBlock]:
        """Yield all free blocks in the order of eviction.

        The cursor is ignored, because here a block can be freed into the middle of the queue,
        before the cursor. The callers are offloading connectors. They skip blocks that they have
        already seen.
        """
        yield from (self._blocks[id_] for id_ in reversed(self._blank))
        yield from (self._blocks[id_] for id_ in self._idle)
