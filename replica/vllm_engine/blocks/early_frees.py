"""Tells which blocks vLLM frees while their request runs: blocks that have left a window, and
states that newer ones replace.

vLLM puts null blocks in their places, so they are no longer among the request's at its end.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.single_type_kv_cache_manager import SingleTypeKVCacheManager

# The request's id, the pool, and the blocks with a hash in the prompt's order; they are held still.
Tell = Callable[[str, BlockPool, Sequence[KVCacheBlock]], None]


def tell_early_frees(managers: Iterable[SingleTypeKVCacheManager], tell: Tell) -> None:
    """From now on. Managers that hold all blocks until the request ends stay as they are."""
    for manager in managers:
        if _frees_early(type(manager)):
            _watch(manager.block_pool, tell)
            manager.__class__ = type("TellingManager", (_Manager, type(manager)), {})


def _frees_early(kind: type[SingleTypeKVCacheManager]) -> bool:
    base = SingleTypeKVCacheManager
    return (
        kind.get_num_skipped_tokens is not base.get_num_skipped_tokens
        or kind.remove_skipped_blocks is not base.remove_skipped_blocks
    )


def _watch(pool: BlockPool, tell: Tell) -> None:
    if not isinstance(pool, _Pool):
        pool.__class__ = type("TellingPool", (_Pool, type(pool)), {})
        pool.kvroute_freeing, pool.kvroute_tell = None, tell


class _Pool(BlockPool):
    kvroute_freeing: str | None  # the request whose early frees these are
    kvroute_tell: Tell

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        if self.kvroute_freeing is not None:
            ordered_blocks = list(ordered_blocks)
            own = [each for each in ordered_blocks if each.block_hash and each.pool in (None, self)]
            if own:
                self.kvroute_tell(self.kvroute_freeing, self, own[::-1])
        super().free_blocks(ordered_blocks)


class _Manager(SingleTypeKVCacheManager):
    block_pool: _Pool

    def remove_skipped_blocks(self, request_id: str, *args: Any, **kwargs: Any) -> None:
        """vLLM calls it for each request in each step."""
        self.block_pool.kvroute_freeing = request_id
        try:
            super().remove_skipped_blocks(request_id, *args, **kwargs)
        finally:
            self.block_pool.kvroute_freeing = None
