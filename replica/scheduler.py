"""vLLM's schedulers with three gaps closed: clears are told at once, the blocks that are cached are
told when asked for, and nobody outlives the replica.

vLLM loads these classes by name inside the engine's own process. They lean on private API of the
pinned version; tests/test_engine.py holds what they rely on.
"""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from vllm import envs
from vllm.distributed import kv_events
from vllm.v1.core.kv_cache_utils import (
    ExternalBlockHash,
    get_block_hash,
)
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore


class Held(kv_events.KVCacheEvent):
    """Blocks cached under each hash, as it is after the events before this one."""

    copies: dict[ExternalBlockHash, int]


class EventBatch(kv_events.EventBatch):
    """vLLM's KVEventBatch, with our event besides its own."""

    events: list[kv_events.BlockStored | kv_events.BlockRemoved | kv_events.AllBlocksCleared | Held]


class _Kvroute:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _die_with_parent()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM queues AllBlocksCleared until its next step, which an idle engine does not have."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        self._publish_events()
        return done

    def tell_held(self) -> None:
        """The engine stands still for it: about half a millisecond for 1,000 blocks."""
        copies: dict[ExternalBlockHash, int] = {}
        as_numbers = envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES  # as in its own events
        pool = self.kv_cache_manager.block_pool  # type: ignore[attr-defined]
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            hash_ = get_block_hash(key)
            name = int.from_bytes(hash_[-8:], "big") if as_numbers else hash_
            copies[name] = copies.get(name, 0) + (len(blocks) if isinstance(blocks, dict) else 1)
        self._publish_events(Held(copies))

    def _publish_events(self, *more: kv_events.KVCacheEvent) -> None:
        """What happened so far is told now, and then what is given."""
        events = [*self.kv_cache_manager.take_events(), *more]  # type: ignore[attr-defined]
        if events:
            self.kv_event_publisher.publish(  # type: ignore[attr-defined]
                EventBatch(ts=time.time(), events=events)
            )


def tell_held(core: EngineCore) -> None:
    """A method of EngineCore, callable from the replica's process by its name."""
    core.scheduler.tell_held()


EngineCore.tell_held = tell_held


class KvrouteScheduler(_Kvroute, Scheduler):
    """For CPUs, where vLLM schedules in step with the model."""


class KvrouteAsyncScheduler(_Kvroute, AsyncScheduler):
    """For GPUs, where the next step is scheduled while the last one runs."""


def _die_with_parent() -> None:
    """A killed replica takes its engine along; vLLM's own engine process would live for ever."""
    parent = multiprocessing.parent_process()
    if parent is None:
        return

    def wait() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="die-with-parent", daemon=True).start()
