"""What requests say of their blocks reaches the free queues of vLLM's block pools."""

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

# In a request's extra_args.
SAID = "kvroute_keep"  # its Keep, as a list
NAME = "kvroute_name"  # under which its blocks can be labelled again
RECENT = 256  # requests whose blocks can
SESSION = Keep.__struct_fields__.index("session")  # where a Keep has it, as a list


def keep_args(request: GenerateRequest) -> dict[str, Any]:
    """For the extra_args of its parameters."""
    if request.keep is None:
        return {}
    return {SAID: msgspec.to_builtins(request.keep), NAME: request.request_id}


def said_of(request: Request) -> Keep:
    """What it says of its blocks."""
    args = _args(request)
    return msgspec.convert(args[SAID], Keep) if SAID in args else KEEP


def name_of(request: Request, keep: Keep) -> str | None:
    """Under which it may say something else than that; None: it will not."""
    name: str | None = _args(request).get(NAME)
    is_final = name is None or kind_of(keep) == kind_of(keep.after_tool_call)
    return None if is_final else name


def _args(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


_Group = tuple[FreeQueue, Sequence[KVCacheBlock]]  # blocks of a request in one group


class _Labelled(NamedTuple):
    """Blocks that a request has given back, and what they held."""

    queue: FreeQueue
    blocks: Sequence[KVCacheBlock]
    hashes: Sequence[BlockHashWithGroupId | None]


class Keeping:
    """Of one scheduler, from before its first request on."""

    def __init__(self, manager: KVCacheManager, pools: Iterable[BlockPool]) -> None:
        self._managers = manager.coordinator.single_type_managers
        self._queues = {pool: FreeQueue(pool) for pool in pools if pool.enable_caching}
        self._recent: OrderedDict[str, list[_Labelled]] = OrderedDict()
        self._recent_blocks = 0
        self._is_told = False  # anything but the default
        self._most_blocks = sum(pool.num_gpu_blocks for pool in self._queues)

    def label(self, request: Request) -> None:
        """The request ends; its blocks are still held."""
        self._label(request, self._blocks(request))

    def label_freed(
        self, request: Request, pool: BlockPool, blocks: Sequence[KVCacheBlock]
    ) -> None:
        """It goes on without these, which are still held."""
        if queue := self._queues.get(pool):
            self._label(request, [(queue, blocks)])

    def label_again(self, name: str, keep: Keep) -> None:
        """Its blocks, as far as they hold what they held; nothing if it ended too long ago."""
        for queue, blocks, hashes in self._forget(name):
            pairs = zip(blocks, hashes, strict=True)
            same = [block for block, hash_ in pairs if hash_ and block.block_hash == hash_]
            queue.label(same, keep)

    def end(self, session: int, running: Iterable[Request]) -> None:
        """Also what its requests will leave, of those that run."""
        for args in map(_args, running):
            if SAID in args and args[SAID][SESSION] == session:
                args[SAID] = msgspec.to_builtins(over(session))
                self._forget(args[NAME])
        for queue in self._queues.values():
            queue.end(session)

    def clear(self) -> None:
        """The pools are empty."""
        self._recent.clear()
        self._recent_blocks = 0
        self._is_told = False
        for queue in self._queues.values():
            queue.clear()

    def evictions(self) -> Iterator[Evictions]:
        """Since the last call; of each pool, where there were any."""
        for queue in self._queues.values():
            if evictions := queue.evictions():
                yield evictions

    def _label(self, request: Request, groups: Iterable[_Group]) -> None:
        keep = said_of(request)
        if keep == KEEP and not self._is_told:
            return  # that is said of all blocks
        self._is_told = True
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
        """Under one name there are all choices of a request."""
        hashes = [block.block_hash for block in blocks]
        self._recent.setdefault(name, []).append(_Labelled(queue, blocks, hashes))
        self._recent.move_to_end(name)
        self._recent_blocks += len(blocks)
        while len(self._recent) > RECENT or self._recent_blocks > self._most_blocks:
            self._forget(next(iter(self._recent)))

    def _forget(self, name: str) -> list[_Labelled]:
        labelled = self._recent.pop(name, [])
        self._recent_blocks -= sum(len(each.blocks) for each in labelled)
        return labelled
