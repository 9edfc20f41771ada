"""vLLM's engines for tests, without its import for each: that takes seven seconds of a core.

One process imports vLLM, and is forked for every engine that this process starts. What a fresh one
would get from its parent, they get: environment and cores. Engines of clusters start as users'
do."""

import multiprocessing
import os
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

IMPORTED = [
    "kvroute.replica.vllm_engine.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
]


def fork_engines() -> None:
    """From now on."""
    from vllm.v1.engine import coordinator, utils

    multiprocessing.set_forkserver_preload(IMPORTED)
    for module in (coordinator, utils):
        module.get_mp_context = _Context


class _Process(ForkServerProcess):
    def start(self) -> None:
        self._target: Any = partial(_run, self._target, dict(os.environ), os.sched_getaffinity(0))
        super().start()


class _Context(ForkServerContext):
    Process = _Process


def _run(
    target: Callable[..., None], env: Mapping[str, str], cores: set[int], *args: Any, **kwargs: Any
) -> None:
    for name in os.environ.keys() | env.keys():
        if env.get(name) is None:
            del os.environ[name]
        elif env[name] != os.environ.get(name):  # setproctitle finds argv beside what is untouched
            os.environ[name] = env[name]
    os.sched_setaffinity(0, cores)
    target(*args, **kwargs)
