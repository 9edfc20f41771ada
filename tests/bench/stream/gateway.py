"""SGLang's gateway, and OpenAI-compatible servers without a model."""

import contextlib
import importlib.util
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import requests

from kvroute.local.ports import free_port
from tests.bench.stream.mock_engine import HOST, NICENESS, serve
from tests.support.kv_publisher import two_ports

MISSING = "SGLang's gateway is left out: `pip install -e '.[bench]'` installs sglang-router."
READY_S = 60.0  # timeout of a server's start in seconds


def is_installed() -> bool:
    return importlib.util.find_spec("sglang_router") is not None


@contextmanager
def mock_engines(
    count: int, *, step_s: float, has_caches: bool = False
) -> Iterator[dict[int, int]]:
    """Run servers, with prefix caches if wanted; yield their process ids by port."""
    spawn, ports = multiprocessing.get_context("spawn"), [free_port() for _ in range(count)]
    events = [two_ports() if has_caches else None for _ in ports]
    started = [
        spawn.Process(target=serve, args=(port, step_s, event_ports), daemon=True)
        for port, event_ports in zip(ports, events, strict=True)
    ]
    try:
        for process in started:
            process.start()
        for port in ports:
            wait_for(
                f"http://{HOST}:{port}/health",
                lambda: all(process.is_alive() for process in started),
            )
        yield {port: process.pid or 0 for port, process in zip(ports, started, strict=True)}
    finally:
        for process in started:
            process.kill()
            process.join()


@contextmanager
def gateway(
    engine_ports: Sequence[int], *, policy: str = "round_robin"
) -> Iterator[tuple[int, int]]:
    """Run the gateway; yield its port and its process id."""
    port = free_port()
    command = [
        *("nice", "-n", str(NICENESS), sys.executable, "-m", "sglang_router.launch_router"),
        *("--host", HOST, "--port", str(port), "--prometheus-port", str(free_port())),
        *("--policy", policy, "--log-level", "error"),
        *("--worker-urls", *(f"http://{HOST}:{engine_port}" for engine_port in engine_ports)),
    ]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    try:
        wait_for(f"http://{HOST}:{port}/readiness", lambda: process.poll() is None)
        yield port, process.pid
    finally:
        process.kill()
        process.wait()


def wait_for(url: str, runs: Callable[[], bool], *, within_s: float = READY_S) -> None:
    """Wait until the URL answers without an error. Fails at once if its process has ended."""
    deadline = time.monotonic() + within_s
    while runs() and time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            if requests.get(url, timeout=2).ok:
                return
        time.sleep(0.1)
    raise TimeoutError(
        f"{url} did not answer; its process {'is running' if runs() else 'has ended'}"
    )
