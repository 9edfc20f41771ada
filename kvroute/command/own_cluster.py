"""A cluster that runs as a child of this process, for one batch or one measurement."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from tempfile import TemporaryFile

import httpx

from kvroute.local.ports import free_port

COMMAND = "from kvroute.cli import main; main()"  # the Python program of the command `kvroute`
POLL_S = 0.5  # seconds between two questions whether the cluster is ready
STOP_S = 60.0  # timeout in seconds of the cluster's shutdown
SHOWN_CHARS = 3000  # how many of the last characters of the cluster's output an error shows


class NotStartedError(RuntimeError):
    """The cluster has ended while it started. The message has the end of its output."""


@contextmanager
def own_cluster(options: Sequence[str], program: str = COMMAND) -> Iterator[str]:
    """Run `kvroute serve` with these options, and return its URL when it is ready.

    Args:
        options: The options of `kvroute serve`. Without --port, a free port is chosen.
        program: The Python program to run in place of the command `kvroute`.

    Raises:
        NotStartedError: It has ended before it was ready.
    """
    port = _port_in(options) or free_port()
    command = [sys.executable, "-c", program, "serve", *options, "--port", str(port)]
    with TemporaryFile("w+") as output, _ended_by(signal.SIGTERM, signal.SIGHUP):
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C ends the batch first, and then the cluster
        )
        try:
            url = f"http://127.0.0.1:{port}"
            while not _is_ready(url):
                if process.poll() is not None:
                    output.seek(0)
                    raise NotStartedError(output.read()[-SHOWN_CHARS:].strip())
                time.sleep(POLL_S)
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)  # the processes of the cluster, too


def _port_in(options: Sequence[str]) -> int | None:
    """Return the value of --port; None: it is not set, or is not a number."""
    words = " ".join(options).replace("--port=", "--port ").split()
    values = [value for name, value in pairwise(words) if name == "--port"]
    return int(values[-1]) if values and values[-1].isdecimal() else None


@contextmanager
def _ended_by(*numbers: signal.Signals) -> Iterator[None]:
    """Let these signals end the block by an exception, so that the cluster is stopped, too."""

    def end(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5, trust_env=False).is_success
    except httpx.TransportError:
        return False
