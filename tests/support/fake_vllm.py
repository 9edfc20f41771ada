"""A process that answers as a vLLM server without a model, for tests of attached servers.

`python -m tests.support.fake_vllm PORT MODEL ROOT BLOCK_SIZE` runs one.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from kvroute.local.ports import free_port
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

HOST = "127.0.0.1"
NAME = "smol"  # the name of the model at the servers
BLOCK_SIZE = 32  # tokens of a block
START_S = 60.0  # seconds that a process may take to start on a busy machine
METRICS = (
    'vllm:cache_config_info{block_size="SIZE",enable_prefix_caching="True",'
    'num_gpu_blocks="200",engine="0"} 1.0\n'
)


class FakeServer:
    """One server; it can be killed, stopped, and started again with another model."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, model: str = NAME, *, block_size: int = BLOCK_SIZE) -> None:
        """Start the process, and wait until it answers; end the process before it, if any."""
        self.kill()
        root = resolve(BUILTIN_MODEL)
        command = [sys.executable, "-m", __name__, str(self.port), model, root, str(block_size)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + START_S
        while True:
            try:
                httpx.get(f"{self.url}/health", timeout=5)
                return
            except httpx.TransportError:
                assert time.monotonic() < deadline
                time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def freeze(self) -> None:
        """Let the server accept connections and never answer."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)


@contextmanager
def fake_servers(count: int) -> Iterator[list[FakeServer]]:
    """Yield servers that do not run yet; kill them at the end."""
    servers = [FakeServer() for _ in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.kill()


def _answers(model: str, root: str, block_size: str) -> dict[str, Any]:
    models = [{"id": model, "root": root, "parent": None, "max_model_len": 2048}]
    return {
        "/health": "",
        "/metrics": METRICS.replace("SIZE", block_size),
        "/v1/models": {"data": models},
        "/version": {"version": "0.32.0"},
        "/v1/completions": {
            "id": "cmpl-1",
            "object": "text_completion",
            "model": model,
            "choices": [{"index": 0, "text": "Hi", "finish_reason": "length"}],
            "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
        },
    }


def main(port: str, *facts: str) -> None:
    answers = _answers(*facts)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            answer = answers.get(self.path)
            text = answer if isinstance(answer, str) else json.dumps(answer)
            body = text.encode()
            self.send_response(404 if answer is None else 200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def log_message(self, *_: Any) -> None: ...

    ThreadingHTTPServer((HOST, int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
