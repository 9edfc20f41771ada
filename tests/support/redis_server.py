"""A Redis that tests kill and start again, and a proxy that makes a Redis slow."""

import asyncio
import contextlib
import ssl
import threading
from asyncio import StreamReader, StreamWriter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from kvroute.local.embedded_redis import _start, _wait_for_ping, embedded_redis
from kvroute.local.ports import free_port
from tests.support.serving import Cluster


@contextlib.contextmanager
def redis_server(port: int, folder: Path) -> Iterator[str]:
    """Run a Redis, and yield its URL. It is killed at the end.

    It starts with the data that a Redis has saved in the folder, if any.
    """
    url, process = f"redis://127.0.0.1:{port}", _start(port, folder)
    try:
        _wait_for_ping(url, process, folder)
        yield url
    finally:
        process.kill()
        process.wait()


class Wire:
    """A TCP proxy that delays data in both directions by `delay_s`.

    With `tls`, clients connect to the proxy with TLS. The Redis for tests does not support TLS.
    """

    def __init__(self, from_port: int, to_port: int, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{from_port}"
        self._tls = tls
        self._from_port = from_port
        self._to_port = to_port

    @contextlib.contextmanager
    def running(self) -> Iterator["Wire"]:
        """Run the proxy in a thread; the context begins when it listens."""
        loop, ends, listens = asyncio.new_event_loop(), asyncio.Event(), threading.Event()
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            thread = threading.Thread(target=runner.run, args=[self._serve(ends, listens)])
            thread.start()
            try:
                assert listens.wait(10), f"nothing listens at {self.url}"
                yield self
            finally:
                loop.call_soon_threadsafe(ends.set)
                thread.join()

    async def _serve(self, ends: asyncio.Event, listens: threading.Event) -> None:
        server = await asyncio.start_server(
            self._connect, "127.0.0.1", self._from_port, ssl=self._tls
        )
        async with server:
            listens.set()
            await ends.wait()
        # The end of the loop cancels the tasks of open connections.

    async def _connect(self, reader: StreamReader, writer: StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            there, back = await asyncio.open_connection("127.0.0.1", self._to_port)
            with contextlib.closing(back):
                await asyncio.gather(self._pass(reader, back), self._pass(there, writer))

    async def _pass(self, reader: StreamReader, writer: StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        on_the_way: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def deliver() -> None:
            while True:
                due_s, data = await on_the_way.get()
                await asyncio.sleep(due_s - loop.time())
                writer.write(data)

        delivering = asyncio.create_task(deliver())
        try:
            while data := await reader.read(1 << 16):
                on_the_way.put_nowait((loop.time() + self.delay_s, data))
            raise ConnectionResetError  # also ends the other direction
        finally:
            delivering.cancel()


@contextlib.contextmanager
def redis_with_tls(certificate: tuple[Path, Path]) -> Iterator[str]:
    """Run a Redis with a password behind a TLS proxy, and yield its URL.

    The proxy uses this certificate and key. Clients must trust the certificate (`ssl_ca_certs`).
    """
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with embedded_redis() as url:
        address = urlsplit(url)
        assert address.port is not None
        with Wire(free_port(), address.port, tls).running() as wire:
            yield wire.url.replace("://", f"://:{address.password}@")


@dataclass
class Wired:
    """A cluster whose Redis a test can kill or make slow."""

    cluster: Cluster
    wire: Wire
    server: ExitStack  # closing it kills Redis
    port: int  # port of Redis itself, not of the proxy
    folder: Path

    def start_redis(self) -> None:
        """Start Redis again. It is empty unless its data was saved."""
        self.server.enter_context(redis_server(self.port, self.folder))
