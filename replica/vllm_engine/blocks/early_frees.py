"""Reports the blocks that vLLM frees while their request still runs.

These are blocks that have left a sliding window, and states that newer states replace. vLLM puts
null blocks in their places. So at the request's end they are not among its blocks.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

# A function that gets the request's id, the pool, and the blocks that have a hash, in the prompt's
# order. When it is called, the request still holds the blocks.
Report = Callable[[str, BlockPool, Sequence[KVCacheBlock]], None]


def report_early_frees(managers: Iterable[SingleTypeKVCacheManager], report: Report) -> None:
    """Call `report` from now on when a manager frees blocks of a running request.

    Managers that hold all blocks until the request ends are not changed.
    """
    for manager in managers:
        if _frees_early(type(manager)):
            _watch(manager.block_pool, report)
            manager.__class__ = type("ReportingManager", (_Manager, type(manager)), {})


def _frees_early(kind: type[SingleTypeKVCacheManager]) -> bool:
    base = SingleTypeKVCacheManager
    return (
        kind.get_num_skipped_tokens is not base.get_num_skipped_tokens
        or kind.remove_skipped_blocks is not base.remove_skipped_blocks
    )


def _watch(pool: BlockPool, report: Report) -> None:
    if not isinstance(pool, _Pool):
        pool.__class__ = type("ReportingPool", (_Pool, type(pool)), {})
        pool.kvroute_freeing, pool.kvroute_report = None, report


class _Pool(BlockPool):
    kvroute_freeing: str | None  # the request whose blocks are being freed early
    kvroute_report: Report

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        if self.kvroute_freeing is not None:
            ordered_blocks = list(ordered_blocks)
            own = [
                block for block in ordered_blocks if block.block_hash and block.pool in (None, self)
            ]
            if own:
                self.kvroute_report(self.kvroute_freeing, self, own[::-1])
        super().free_blocks(ordered_blocks)


class _Manager(SingleTypeKVCacheManager):
    block_pool: _Pool

    def remove_skipped_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """Mark the blocks that are freed meanwhile as freed early.

        vLLM calls this for each request in each step.
        """
        self.block_pool.kvroute_freeing = request_id
        try:
            super().remove_skipped_blocks(request_id, *args, **kwargs)
        finally:
            self.block_pool.kvroute_freeing = None
