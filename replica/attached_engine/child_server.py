"""A vLLM server that a replica starts for itself, without any change to vLLM.

It is used with `--engine-hooks off`, and where the installed vLLM does not fit kvroute's own
engine.
"""

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kvroute.contract.generation import CannotRunError
from kvroute.process import vllm_build
from kvroute.process.builtin_model import is_builtin
from kvroute.replica.vllm_engine.dtype import choose_dtype
from kvroute.replica.vllm_engine.process.cpu_affinity import Cores
from kvroute.replica.vllm_engine.process.crash_log import last_error
from kvroute.settings.replica import ReplicaSettings

log = logging.getLogger("kvroute.replica")

# Sends the server SIGTERM when the replica's process ends, however it ends, and becomes the server.
LAUNCH = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""
CHECK_INTERVAL_S = 0.2  # seconds between two looks whether the server has ended
STOP_S = 20.0  # seconds that the server may take to stop by itself
LINES = 3  # last lines of the server's output in the error of a failed start


class ChildServer:
    """The process, and the folder with its sockets; it ends with `close`."""

    def __init__(self, settings: ReplicaSettings, model: str, cores: Cores) -> None:
        # /tmp, because the path of a Unix socket may have at most 108 bytes.
        self._folder = TemporaryDirectory(prefix="kvroute-server-", dir="/tmp")
        folder = Path(self._folder.name)
        self.socket = folder / "http"
        self._log = folder / "log"
        self._process = _start(settings, model, folder, self.socket, self._log, cores)

    async def watch_start(self) -> None:
        """Wait until the process ends, and raise why. Raises CannotRunError."""
        while self._process.poll() is None:
            await asyncio.sleep(CHECK_INTERVAL_S)
        raise CannotRunError(f"vllm serve has ended: {self._reason()}")

    def problem(self) -> str:
        """Return why the process has ended; empty: it runs."""
        return "" if self._process.poll() is None else f"vllm serve has ended: {self._reason()}"

    def _reason(self) -> str:
        text = self._log.read_text(errors="replace")
        return last_error(text) or " ".join(text.splitlines()[-LINES:]) or "no reason given"

    async def close(self) -> None:
        """End the server and all processes that it has started."""
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            await asyncio.to_thread(self._process.wait, STOP_S)
        self._signal(signal.SIGKILL)
        self._folder.cleanup()

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def _start(
    settings: ReplicaSettings, model: str, folder: Path, socket: Path, output: Path, cores: Cores
) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model]
    command += _flags(_options(settings, folder, socket))
    log.info("starting %s", " ".join(command))
    command = [sys.executable, "-c", LAUNCH, str(os.getpid()), *command]
    with output.open("wb") as file, cores.bound():
        return subprocess.Popen(
            command,
            env=os.environ | _environment(settings, model, cores),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,  # so that one signal reaches all of its processes
        )


def _options(settings: ReplicaSettings, folder: Path, socket: Path) -> Mapping[str, Any]:
    """Return the arguments of `vllm serve`; the user's own come before kvroute's."""
    on_cpu = not vllm_build.is_for_gpus()
    dtype = choose_dtype(settings.dtype, is_builtin=is_builtin(settings.model), on_cpu=on_cpu)
    on_cpus = {
        "kv_cache_memory_bytes": settings.kv_cache_memory_mb << 20,
        "enforce_eager": True,
        "distributed_executor_backend": "uni" if settings.tensor_parallel_size == 1 else None,
    }
    adapters = [f"{adapter.name}={adapter.path}" for adapter in settings.adapters]
    ours = {
        "uds": str(socket),
        "served_model_name": settings.served_model_name,
        "dtype": dtype,
        "block_size": settings.block_size,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enable_prefix_caching": None if settings.prefix_caching else False,
        "max_model_len": settings.max_model_len,
        "max_num_seqs": settings.max_num_seqs,
        "revision": settings.revision or None,
        "enable_lora": True if adapters else None,
        "lora_modules": adapters or None,
        "enable_prompt_tokens_details": True,
        "kv_events_config": {
            "enable_kv_cache_events": settings.prefix_caching,
            "publisher": "zmq" if settings.prefix_caching else "null",
            "endpoint": f"ipc://{folder / 'events'}",
            "replay_endpoint": f"ipc://{folder / 'replay'}",
        },
    }
    return (on_cpus if on_cpu else {}) | settings.engine_args | ours


def _flags(options: Mapping[str, Any]) -> Iterator[str]:
    """Yield the options as flags of vLLM's command line."""
    for name, value in options.items():
        flag = name.replace("_", "-")
        match value:
            case None:
                continue
            case True:
                yield f"--{flag}"
            case False:
                yield f"--no-{flag}"
            case dict():
                yield from (f"--{flag}", json.dumps(value))
            case list():
                yield from (f"--{flag}", *map(str, value))
            case _:
                yield from (f"--{flag}", str(value))


def _environment(settings: ReplicaSettings, model: str, cores: Cores) -> dict[str, str]:
    environment = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    if Path(model).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if not vllm_build.is_for_gpus():
        threads = cores.threads(1)
        environment |= {"OMP_NUM_THREADS": str(threads), "TORCHDYNAMO_DISABLE": "1"}
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    return environment
