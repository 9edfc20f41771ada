"""vLLM's own server with KV cache events, as a user runs it; it can be killed and started again."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from kvroute.local.ports import free_port
from tests.bench.stock_server import stock_command
from tests.bench.stream.mock_engine import HOST

NAME = "smol"  # the model's name at the servers
BLOCK = 32  # tokens of a KV cache block
CACHE_MB = 1024  # memory that the cache may take; BLOCKS limits it further
BLOCKS = 200  # blocks of a server's cache, one of which vLLM never uses
READY_S = 600.0  # timeout of a server's start in seconds, also on a busy machine


class AttachableServer:
    """One `vllm serve`; `start` can be called again after `kill`."""

    def __init__(self, model: Path, log: Path, options: Sequence[str] = ()) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None
        events = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{free_port()}",
            "replay_endpoint": f"tcp://{HOST}:{free_port()}",
        }
        self._command = stock_command(
            str(model),
            *("--block-size", str(BLOCK), "--num-gpu-blocks-override", str(BLOCKS)),
            *("--max-model-len", "2048", "--max-num-seqs", "8", "--dtype", "float32"),
            *("--kv-events-config", json.dumps(events)),
            *options,
            name=NAME,
            port=self.port,
            cache_mb=CACHE_MB,
        )

    def start(self) -> None:
        """Start the process, without waiting until it answers."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env={**os.environ, "TORCHDYNAMO_DISABLE": "1", "VLLM_NO_USAGE_STATS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # so that `kill` ends its engine too
            )

    def wait(self) -> None:
        """Wait until the server answers."""
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            assert self._process is not None
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.2)
        raise TimeoutError(self._log.read_text()[-3000:])

    def kill(self) -> None:
        """Kill the server and its engine at once."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


@contextmanager
def attachable_servers(
    model: Path, folder: Path, count: int = 2, options: Sequence[str] = ()
) -> Iterator[list[AttachableServer]]:
    """Run servers until the end of the context, and wait until all of them answer."""
    logs = [folder / f"server-{number}.log" for number in range(count)]
    servers = [AttachableServer(model, log, options) for log in logs]
    try:
        for server in servers:
            server.start()
        for server in servers:
            server.wait()
        yield servers
    finally:
        for server in servers:
            server.kill()
