"""Passes the retention hints of requests to the free queues of vLLM's block pools."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.request import Request

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import KEEP, Keep, over
from kvroute.replica.engine.idle_queue import kind_of
from kvroute.replica.engine.kv_events import Evictions
from kvroute.replica.vllm_engine.blocks.free_queue import FreeQueue

# Keys of a request's extra_args.
KEEP_ARG = "kvroute_keep"  # the request's retention hint: a Keep, as a list
NAME_ARG = "kvroute_name"  # the request's id, for a later change of its blocks' retention
RECENT = 256  # number of ended requests whose blocks' retention can still be changed
SESSION = Keep.__struct_fields__.index("session")  # index of the session in a Keep as a list


def keep_args(request: GenerateRequest) -> dict[str, Any]:
    """Return the entries for the request's extra_args."""
    if request.keep is None:
        return {}
    return {KEEP_ARG: msgspec.to_builtins(request.keep), NAME_ARG: request.request_id}


def keep_of(request: Request) -> Keep:
    """Return the request's retention hint."""
    args = _args(request)
    return msgspec.convert(args[KEEP_ARG], Keep) if KEEP_ARG in args else KEEP


def name_of(request: Request, keep: Keep) -> str | None:
    """Return the request's name if its retention may change after its end, else None."""
    name: str | None = _args(request).get(NAME_ARG)
    is_final = name is None or kind_of(keep) == kind_of(keep.after_tool_call)
    return None if is_final else name


def _args(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


_Group = tuple[FreeQueue, Sequence[KVCacheBlock]]  # a request's blocks in one KV cache group


class _Labelled(NamedTuple):
    """Blocks that a request has freed, and their hashes at that time."""

    queue: FreeQueue
    blocks: Sequence[KVCacheBlock]
    hashes: Sequence[BlockHashWithGroupId | None]


class Keeping:
    """The retention hints for one scheduler's blocks; made before the first request."""

    def __init__(self, manager: KVCacheManager, pools: Iterable[BlockPool]) -> None:
        self._managers = manager.coordinator.single_type_managers
        self._queues = {pool: FreeQueue(pool) for pool in pools if pool.enable_caching}
        self._recent: OrderedDict[str, list[_Labelled]] = OrderedDict()
        self._recent_blocks = 0
        self._has_hints = False  # True once a request had another hint than the default
        self._most_blocks = sum(pool.num_gpu_blocks for pool in self._queues)

    def label(self, request: Request) -> None:
        """Set the retention of the blocks of a request that ends; it still holds them."""
        self._label(request, self._blocks(request))

    def label_freed(
        self, request: Request, pool: BlockPool, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """Set the retention of blocks that a running request frees; it still holds them."""
        if queue := self._queues.get(pool):
            self._label(request, [(queue, blocks)])

    def label_again(self, name: str, keep: Keep) -> None:
        """Change the retention of an ended request's blocks, except blocks with new content.

        This has no effect if the request ended too long ago.
        """
        for queue, blocks, hashes in self._forget(name):
            pairs = zip(blocks, hashes, strict=True)
            unchanged = [block for block, hash_ in pairs if hash_ and block.block_hash == hash_]
            queue.label(unchanged, keep)

    def end(self, session: int, running: Iterable[Request]) -> None:
        """End a session: its blocks are evicted first, also those of its running requests."""
        for args in map(_args, running):
            if KEEP_ARG in args and args[KEEP_ARG][SESSION] == session:
                args[KEEP_ARG] = msgspec.to_builtins(over(session))
                self._forget(args[NAME_ARG])
        for queue in self._queues.values():
            queue.end(session)

    def clear(self) -> None:
        """Forget all hints; the pools have cleared their caches."""
        self._recent.clear()
        self._recent_blocks = 0
        self._has_hints = False
        for queue in self._queues.values():
            queue.clear()

    def evictions(self) -> Iterator[Evictions]:
        """Yield each pool's evictions since the last call, if there were any."""
        for queue in self._queues.values():
            if evictions := queue.evictions():
                yield evictions

    def _label(self, request: Request, groups: Iterable[_Group]) -> None:
        keep = keep_of(request)
        if keep == KEEP and not self._has_hints:
            return  # all blocks have the default
        self._has_hints = True
        name = name_of(request, keep)
        for queue, blocks in groups:
            queue.label(blocks, keep)
            if name is not None:
                self._remember(name, queue, blocks)

    def _blocks(self, request: Request) -> Iterator[_Group]:
        for manager in self._managers:
            queue = self._queues.get(manager.block_pool)
            blocks = manager.req_to_blocks.get(request.request_id, ())
            if queue is not None and blocks:
                yield queue, [block for block in blocks if not block.is_null]

    def _remember(self, name: str, queue: FreeQueue, blocks: Sequence[KVCacheBlock]) -> None:
        """Keep the blocks for `label_again`; all choices of a request have the same name."""
        hashes = [block.block_hash for block in blocks]
        self._recent.setdefault(name, []).append(_Labelled(queue, blocks, hashes))
        self._recent.move_to_end(name)
        self._recent_blocks += len(blocks)
        while len(self._recent) > RECENT or self._recent_blocks > self._most_blocks:
            self._forget(next(iter(self._recent)))

    def _forget(self, name: str) -> list[_Labelled]:
        labelled = self._recent.pop(name, [])
        self._recent_blocks -= sum(len(group.blocks) for group in labelled)
        return labelled
