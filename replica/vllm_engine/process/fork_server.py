"""Forks vLLM's processes on CPUs from a server process that has already imported vLLM.

Importing vLLM takes seven seconds on one core. The server and the replica import it at the same
time. Without the server, the engine's process would be started and begin to import vLLM only after
the replica's import. On GPUs, vLLM spawns its processes as usual.
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
THREADS = "OMP_NUM_THREADS"  # environment variable that OpenMP reads when it is loaded


def start(threads: int) -> None:
    """Start the server without waiting for its imports.

    Args:
        threads: The number of threads that each engine computes with.
    """
    before = os.environ.get(THREADS)
    os.environ[THREADS] = f"{threads}"
    multiprocessing.set_forkserver_preload([IMPORTED])
    forkserver.ensure_running()
    _set(THREADS, before)  # the limit is for engines, not for this process


def mp_context() -> "Context":
    """Return the context in which vLLM starts its processes: it forks them from the server."""
    from vllm.utils.system_utils import get_mp_context

    get_mp_context()  # vLLM also sets environment variables there
    return Context()


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
    """Run `target` with the environment and the CPU cores that a spawned process would inherit."""
    gc.enable()
    for name in os.environ.keys() | env.keys():
        _set(name, env.get(name))
    os.sched_setaffinity(0, cores)
    target(*args, **kwargs)


def _set(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    elif value != os.environ.get(name):
        # Only changed variables are set. setproctitle needs all others at their original place in
        # memory, which is next to argv.
        os.environ[name] = value
