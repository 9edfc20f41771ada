"""What requests say of their blocks reaches the free queues of vLLM's block pools."""

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import Keep, Order
from kvroute.replica.vllm_engine.blocks.free_queue import FreeQueue

SAID = "kvroute_keep"  # in a request's extra_args: its Keep, as a list


def keep_args(request: GenerateRequest) -> dict[str, Any]:
    """Return what the extra_args of a request's parameters have of it."""
    return {} if request.keep is None else {SAID: msgspec.to_builtins(request.keep)}


def said_of(request: Request) -> Keep:
    """Return what a request says of its blocks."""
    return msgspec.convert(_args(request).get(SAID, ()), Keep)


def _args(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


class Keeping:
    """The free queues of one scheduler, from before its first request on."""

    def __init__(self, manager: KVCacheManager, pools: Iterable[BlockPool]) -> None:
        self._managers = manager.coordinator.single_type_managers
        self._queues = {pool: FreeQueue(pool) for pool in pools if pool.enable_caching}

    def label(self, request: Request) -> None:
        """Record what a request says that ends; it still holds its blocks."""
        keep = said_of(request)
        for manager in self._managers:
            if queue := self._queues.get(manager.block_pool):
                blocks = manager.req_to_blocks.get(request.request_id, ())
                queue.label([block for block in blocks if not block.is_null], keep)

    def end(self, session: int, running: Iterable[Request]) -> None:
        """Evict a session's blocks first, and what its running requests will leave."""
        for args in map(_args, running):
            if msgspec.convert(args.get(SAID, ()), Keep).session == session:
                args[SAID] = msgspec.to_builtins(Keep(Order.ENDED, session))
        for queue in self._queues.values():
            queue.end(session)

    def clear(self) -> None:
        """Forget everything: the pools are empty."""
        for queue in self._queues.values():
            queue.clear()
