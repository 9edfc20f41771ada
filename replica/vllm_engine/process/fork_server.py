"""Forks vLLM's processes on CPUs from a server that has imported vLLM.

The server imports vLLM at the same time as the replica. Each import takes seven seconds of a core;
without the server, the second import would begin after the first. On GPUs, vLLM spawns its
processes as usual.
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
    """Start the server without waiting for it; `threads` is the number of an engine's threads."""
    before = os.environ.get(THREADS)
    os.environ[THREADS] = f"{threads}"
    multiprocessing.set_forkserver_preload([IMPORTED])
    forkserver.ensure_running()
    _set(THREADS, before)  # this process may use all cores


def install() -> None:
    """Make vLLM fork its processes from the server; call this before vLLM starts a process."""
    from vllm.utils.system_utils import get_mp_context
    from vllm.v1.engine import coordinator, utils

    def context() -> Context:
        get_mp_context()  # this also prepares the environment
        return Context()

    for module in (coordinator, utils):
        module.get_mp_context = context


class _ForkedProcess(ForkServerProcess):
    def start(self) -> None:
        env, cores = dict(os.environ), os.sched_getaffinity(0)
        self._target: Any = partial(_run, self._target, env, cores)
        super().start()


class Context(ForkServerContext):
    Process = _ForkedProcess


def _run(
    target: Callable[..., None], env: Mapping[str, str], cores: set[int], *args: Any, **kwargs: Any
) -> None:
    """Run `target` with the environment and the cores that a spawned process would inherit."""
    gc.enable()
    for name in os.environ.keys() | env.keys():
        _set(name, env.get(name))
    os.sched_setaffinity(0, cores)
    target(*args, **kwargs)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif value != os.environ.get(name):
        # Only changed variables are set: setproctitle needs the other variables at their original
        # place in memory, which is next to argv.
        os.environ[name] = value
