"""Passes the retention hints of requests to the free queues of vLLM's block pools.

A hint determines when the blocks of an ended request are evicted (contract/keep.py).
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.vllm_engine.blocks.free_queue import FreeQueue

# Key in the extra_args of vLLM's SamplingParams. The value is the request's RetentionHint, as a
# list.
HINT_ARG = "kvroute_keep"


def hint_args(request: GenerateRequest) -> dict[str, Any]:
    """Return the entries of vLLM's extra_args for the request's retention hint."""
    return {} if request.keep is None else {HINT_ARG: msgspec.to_builtins(request.keep)}


def hint_of(request: Request) -> RetentionHint:
    """Return the retention hint in a request's extra_args, or the default hint."""
    return msgspec.convert(_args(request).get(HINT_ARG, ()), RetentionHint)


def _args(request: Request) -> dict[str, Any]:
    return (request.sampling_params and request.sampling_params.extra_args) or {}


class RetentionHints:
    """Applies retention hints to the block pools of one scheduler.

    Create this object before the first request.
    """

    def __init__(self, manager: KVCacheManager, pools: Iterable[BlockPool]) -> None:
        self._managers = manager.coordinator.single_type_managers
        self._queues = {pool: FreeQueue(pool) for pool in pools if pool.enable_caching}

    def label(self, request: Request) -> None:
        """Set the retention of an ending request's blocks, before the request frees them."""
        hint = hint_of(request)
        for manager in self._managers:
            if queue := self._queues.get(manager.block_pool):
                blocks = manager.req_to_blocks.get(request.request_id, ())
                queue.label([block for block in blocks if not block.is_null], hint)

    def end(self, session: int, running: Iterable[Request]) -> None:
        """End a session. The blocks that only it uses are then evicted first.

        This includes the blocks of its running requests, once these end.
        """
        for args in map(_args, running):
            if msgspec.convert(args.get(HINT_ARG, ()), RetentionHint).session == session:
                args[HINT_ARG] = msgspec.to_builtins(RetentionHint(Order.ENDED, session))
        for queue in self._queues.values():
            queue.end(session)

    def clear(self) -> None:
        """Forget all hints, because the pools have cleared their caches."""
        for queue in self._queues.values():
            queue.clear()
