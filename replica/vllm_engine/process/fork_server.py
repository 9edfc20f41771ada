"""On CPUs, vLLM's processes are forked from one that imports vLLM while the replica does so too.
Each import takes seven seconds of a core, and otherwise the second one begins after the first.

On GPUs vLLM spawns them, as it does by itself.
"""

import gc
import multiprocessing
import os
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = "kvroute.replica.vllm_engine.process.imported"
THREADS = "OMP_NUM_THREADS"  # OpenMP reads it when it is loaded


def begin(threads: int) -> None:
    """Starts that process, and does not wait for it. threads: that an engine computes with."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = f"{threads}"
    multiprocessing.set_forkserver_preload([IMPORTED])
    forkserver.ensure_running()
    _set(THREADS, before)  # this process may use all cores


def install() -> None:
    """Before vLLM starts a process."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import coordinator, utils

    def context() -> Context:
        get_mp_context()  # which also prepares the environment
        return Context()

    for module in (coordinator, utils):
        module.get_mp_context = context


class _Process(ForkServerProcess):
    def start(self) -> None:
        env, cores = dict(os.environ), os.sched_getaffinity(0)
        self._target: Any = partial(_run, self._target, env, cores)
        super().start()


class Context(ForkServerContext):
    Process = _Process


def _run(
    target: Callable[..., None], env: Mapping[str, str], cores: set[int], *args: Any, **kwargs: Any
) -> None:
    """With what a spawned process gets from the one that starts it."""
    gc.enable()
    for name in os.environ.keys() | env.keys():
        _set(name, env.get(name))
    os.sched_setaffinity(0, cores)
    target(*args, **kwargs)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif value != os.environ.get(name):  # setproctitle finds argv beside what is untouched
        os.environ[name] = value
