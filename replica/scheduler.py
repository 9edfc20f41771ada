"""vLLM's schedulers with two gaps closed: clears are told at once, and nobody outlives the replica.

vLLM loads these classes by name inside the engine's own process. They lean on private API of the
pinned version; tests/test_engine.py holds what they rely on.
"""

import multiprocessing
import os
import signal
import threading
import time
from typing import Any

from vllm.distributed.kv_events import KVEventBatch
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler


class _Kvroute:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _die_with_parent()

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """vLLM queues AllBlocksCleared until its next step, which an idle engine does not have."""
        done: bool = super().reset_prefix_cache(*args, **kwargs)  # type: ignore[misc]
        events = self.kv_cache_manager.take_events()  # type: ignore[attr-defined]
        if events:
            self.kv_event_publisher.publish(  # type: ignore[attr-defined]
                KVEventBatch(ts=time.time(), events=events)
            )
        return done


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
