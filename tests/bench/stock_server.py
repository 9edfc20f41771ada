"""vLLM's own server, started with `vllm serve`. Its engine runs in another process."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from kvroute.local.ports import free_port
from tests.bench.stream.gateway import wait_for
from tests.bench.stream.mock_engine import HOST

READY_S = 600.0  # seconds that the server has to start, even on a busy machine
END_S = 30.0  # seconds after SIGTERM at which the server is killed


def stock_command(model: str, *args: str, name: str, port: int, cache_mb: int) -> list[str]:
    """Return the command of a server on this machine's CPUs."""
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model),
        *("--host", HOST, "--port", str(port), "--served-model-name", name),
        *("--kv-cache-memory-bytes", str(cache_mb << 20), "--enable-prompt-tokens-details"),
        *("--enforce-eager", "--distributed-executor-backend", "uni"),  # as in kvroute's replicas
        *("--disable-uvicorn-access-log", *args),
    ]


@contextmanager
def stock_server(
    model: str, *args: str, name: str, cache_mb: int, env: Mapping[str, str] = {}
) -> Iterator[tuple[int, int]]:
    """Run the server; yield its port and its process id. `name` is the model's name for clients."""
    port = free_port()
    process = subprocess.Popen(
        stock_command(model, *args, name=name, port=port, cache_mb=cache_mb),
        env={**os.environ, "TORCHDYNAMO_DISABLE": "1", **env},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(f"http://{HOST}:{port}/health", lambda: process.poll() is None, within_s=READY_S)
        yield port, process.pid
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:  # vLLM may ignore a signal during its start
            process.kill()
            process.wait()
