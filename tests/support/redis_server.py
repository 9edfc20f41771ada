"""A Redis that a test kills and starts again, and a wire on which one is slow."""

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
    """Its URL. It is killed in the end; it starts with what was last saved in the folder."""
    url, process = f"redis://127.0.0.1:{port}", _start(port, folder)
    try:
        _wait_for_ping(url, process, folder)
        yield url
    finally:
        process.kill()
        process.wait()


class Wire:
    """A TCP proxy: what goes either way arrives `delay_s` later. tls: what the proxy's clients
    find, as at a Redis with TLS, which ours cannot do."""

    def __init__(self, from_port: int, to_port: int, tls: ssl.SSLContext | None = None) -> None:
        self.delay_s = 0.0
        self.url = f"{'rediss' if tls else 'redis'}://127.0.0.1:{from_port}"
        self._tls = tls
        self._from_port = from_port
        self._to_port = to_port

    @contextlib.contextmanager
    def running(self) -> Iterator["Wire"]:
        """In a thread of its own, once it listens."""
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
        # The connections end with the loop, which cancels what is left.

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
            raise ConnectionResetError  # the other way ends as well
        finally:
            delivering.cancel()


@contextlib.contextmanager
def redis_with_tls(certificate: tuple[Path, Path]) -> Iterator[str]:
    """The URL of one with a password, behind a proxy with this certificate and key; clients say in
    `ssl_ca_certs` whom they trust."""
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(*certificate)
    with embedded_redis() as url:
        at = urlsplit(url)
        assert at.port is not None
        with Wire(free_port(), at.port, tls).running() as wire:
            yield wire.url.replace("://", f"://:{at.password}@")


@dataclass
class Wired:
    """A cluster on a Redis that may be away, or as far as a test says."""

    cluster: Cluster
    wire: Wire
    server: ExitStack  # Redis, while it runs
    port: int  # of Redis itself
    folder: Path

    def start_redis(self) -> None:
        """It is empty unless it was told to save."""
        self.server.enter_context(redis_server(self.port, self.folder))
