"""Behind each load balancer that we ship: streams, errors, and two nodes of which one goes away."""

import asyncio
import contextlib
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import openai
import psutil
import pytest
from openai import AsyncOpenAI

from kvroute.local.ports import free_port
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.api.call_limits import MAX_CHOICES
from tests.support.audience import Audience, Received
from tests.support.certificates import certificate
from tests.support.clients import async_openai_client
from tests.support.load_balancers import LoadBalancer, haproxy, nginx, with_tls
from tests.support.serving import Cluster, kill_at_once
from tests.support.waiting import until

Start = Callable[..., AbstractContextManager[LoadBalancer]]

BOTH = [haproxy, nginx]
LISTENERS = 12  # behind each, where both are in front of two nodes
LONG = 400  # tokens: no answer ends before the last one has begun, however busy the machine
REQUESTS = 60  # new ones, when a node has gone
SERVE_DRAINS = """
import sys, ray
from kvroute.controller.ray_connection import connected
with connected(sys.argv[1]):
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_PROXY_ACTOR"):
            ray.get(ray.get_actor(**actor).update_draining.remote(True))
"""


@pytest.fixture(scope="module", params=BOTH, ids=lambda start: start.__name__)
def balancer(request: pytest.FixtureRequest, node: Cluster) -> Iterator[LoadBalancer]:
    """In front of a node, and of one that is not there."""
    with request.param([nobody(), node.url]) as balancer:
        yield balancer


@pytest.fixture
async def client(balancer: LoadBalancer) -> AsyncIterator[AsyncOpenAI]:
    async with async_openai_client(balancer.url) as client:
        yield client


def nobody() -> str:
    return f"http://127.0.0.1:{free_port()}"


def replicas(cluster: Cluster) -> set[str]:
    """Their ids."""
    listed = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"] for replica in listed}


async def ask(client: AsyncOpenAI, tokens: int = 2) -> None:
    await client.completions.create(model=BUILTIN_MODEL, prompt="a word", max_tokens=tokens)


async def test_a_stream_comes_as_it_is_made(client: AsyncOpenAI) -> None:
    """Another request is answered between its first piece and its last."""
    stream = await client.completions.create(
        model=BUILTIN_MODEL, prompt="a tale", max_tokens=1000, stream=True
    )
    async with stream:
        await anext(aiter(stream))
        other, later = asyncio.create_task(ask(client)), 0
        async for _ in stream:
            later += other.done()
            if later == 2:
                break
    assert later == 2
    await other


@pytest.mark.parametrize(
    ("start", "name"), [(haproxy, "haproxy.cfg"), (nginx, "nginx.conf")], ids=["haproxy", "nginx"]
)
async def test_with_tls_a_stream_comes_as_it_is_made_too(
    start: Start, name: str, node: Cluster, tmp_path: Path
) -> None:
    pair, port = certificate(tmp_path / "tls"), free_port()
    trusting = ssl.create_default_context(cafile=pair[0])
    url = f"https://127.0.0.1:{port}"
    with start([nobody(), node.url], with_tls(name, port, pair)):
        async with async_openai_client(url, trusting=trusting) as client:
            await test_a_stream_comes_as_it_is_made(client)
        async with async_openai_client(url) as client:
            with pytest.raises(openai.APIConnectionError):
                await ask(client)
        for protocol in ("h2", "http/1.1"):
            version = await asyncio.to_thread(spoken, port, trusting, protocol)
            assert version == ("TLSv1.3", protocol)


def spoken(port: int, trusting: ssl.SSLContext, protocol: str) -> tuple[str | None, str | None]:
    """The version of TLS, and the protocol inside it, that a client of one protocol gets."""
    trusting.set_alpn_protocols([protocol])
    with (
        socket.create_connection(("127.0.0.1", port)) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as wrapped,
    ):
        return wrapped.version(), wrapped.selected_alpn_protocol()


async def test_no_request_fails_for_a_node_that_is_not_there(client: AsyncOpenAI) -> None:
    await asyncio.gather(*(ask(client) for _ in range(REQUESTS)))


async def test_the_largest_call_passes(client: AsyncOpenAI) -> None:
    """Its headers do not grow with it: nginx takes 4 kB of them."""
    prompts = [str(number) for number in range(MAX_CHOICES)]
    answer = await client.completions.create(model=BUILTIN_MODEL, prompt=prompts, max_tokens=1)
    assert [choice.index for choice in answer.choices] == list(range(MAX_CHOICES))


async def test_a_request_keeps_its_id(client: AsyncOpenAI) -> None:
    answer = await client.models.with_raw_response.list(extra_headers={"x-request-id": "mine-1"})
    assert answer.headers["x-request-id"] == "mine-1"


async def test_a_body_that_is_too_large_is_refused_as_openai_does(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as refused:
        await client.completions.create(model=BUILTIN_MODEL, prompt="x" * (17 << 20))
    assert refused.value.status_code == 413
    assert refused.value.code == "request_too_large"


async def test_so_is_one_that_does_not_say_its_length(balancer: LoadBalancer) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(17):
            yield b"x" * (1 << 20)

    async with httpx.AsyncClient(timeout=60) as client:
        answer = await client.post(f"{balancer.url}/v1/completions", content=body())
    assert answer.status_code == 413
    assert answer.json()["error"]["code"] == "request_too_large"


@contextlib.asynccontextmanager
async def node_that(gets: Callable[[asyncio.StreamReader], Awaitable[None]]) -> AsyncIterator[str]:
    """Its URL. It is well, and answers no POST, but hangs up after this."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            if (await reader.readuntil(b"\r\n\r\n")).startswith(b"POST"):
                await gets(reader)
            else:
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("start", BOTH)
async def test_a_node_is_told_that_a_client_has_left(start: Start) -> None:
    """By the end of the connection, before anything was answered."""
    asked, told = asyncio.Event(), asyncio.Event()

    async def wait(reader: asyncio.StreamReader) -> None:
        asked.set()
        with contextlib.suppress(ConnectionResetError):
            await reader.read()
        told.set()

    async with node_that(wait) as url:
        with start([nobody(), url]) as balancer:
            async with async_openai_client(balancer.url) as client:
                asking = asyncio.create_task(ask(client))
                await until(asked.is_set)
                asking.cancel()
                await until(told.is_set)


@pytest.mark.parametrize("start", BOTH)
async def test_a_request_that_a_node_has_got_is_sent_to_no_other(start: Start) -> None:
    requests = []

    async def count(reader: asyncio.StreamReader) -> None:
        requests.append(await reader.readuntil(b"}"))

    async with node_that(count) as one, node_that(count) as other:
        with start([one, other]) as balancer:
            async with async_openai_client(balancer.url) as client:
                with pytest.raises(openai.InternalServerError) as failed:
                    await ask(client)
    assert failed.value.code == "unavailable"
    assert len(requests) == 1


@pytest.mark.parametrize(
    ("start", "brief"),
    [
        (haproxy, {"timeout client 60s": "timeout client 1s", "request 10s": "request 1s"}),
        (nginx, {"header_timeout 10s": "header_timeout 1s", "60s;": "1s;"}),
    ],
    ids=["haproxy", "nginx"],
)
async def test_a_client_that_waits_is_not_taken_for_a_slow_one(
    start: Start, brief: dict[str, str], node: Cluster
) -> None:
    """What limits slow clients is a second here, and the whole answer takes three."""
    with start([nobody(), node.url], brief) as balancer:
        async with async_openai_client(balancer.url) as client:
            await ask(client, tokens=100)


@pytest.mark.parametrize("start", BOTH)
async def test_without_any_node_the_error_is_openais(start: Start) -> None:
    with start([nobody(), nobody()]) as balancer:
        async with async_openai_client(balancer.url) as client:
            with pytest.raises(openai.InternalServerError) as failed:
                await ask(client)
    assert failed.value.type == "server_error"
    assert "no node is ready" in failed.value.message


async def test_haproxy_refuses_at_once_what_is_larger_by_far(node: Cluster) -> None:
    """Told by its length: not a byte of it is sent."""
    with haproxy([nobody(), node.url]) as balancer:
        reader, writer = await asyncio.open_connection(
            *balancer.url.removeprefix("http://").split(":")
        )
        writer.write(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 99999999\r\n\r\n"
        )
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 413")
    assert b'"code":"request_too_large"' in answer


@pytest.fixture
def leaver(request: pytest.FixtureRequest) -> Cluster:
    """The node that goes away: the one that the test names."""
    leaver: Cluster = request.getfixturevalue(request.param)
    return leaver


@pytest.fixture
def balancers(trio: Cluster, leaver: Cluster) -> Iterator[list[LoadBalancer]]:
    """HAProxy and nginx, each in front of one node that stays and one that goes away."""
    with contextlib.ExitStack() as running:
        yield [running.enter_context(start([trio.url, leaver.url])) for start in BOTH]


@pytest.fixture
async def clients(balancers: list[LoadBalancer]) -> AsyncIterator[list[AsyncOpenAI]]:
    """One of each."""
    async with contextlib.AsyncExitStack() as open_:
        urls = [balancer.url for balancer in balancers]
        yield [await open_.enter_async_context(async_openai_client(url)) for url in urls]


def audiences_of(clients: list[AsyncOpenAI], *, tokens: int = 60) -> list[Audience]:
    """One behind each load balancer."""
    return [Audience(client, 1, clients=LISTENERS, tokens=tokens) for client in clients]


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("leaver", ["plain"], indirect=True)
async def test_a_node_that_ray_drains_or_that_is_marked_down_leaves_in_peace(
    balancers: list[LoadBalancer], clients: list[AsyncOpenAI], trio: Cluster, leaver: Cluster
) -> None:
    """HAProxy looks, nginx is told. All stream answer after answer, and nobody notices."""
    undisturbed = await asyncio.gather(*(each.listen() for each in audiences_of(clients)))
    audiences, over, there = audiences_of(clients), asyncio.Event(), replicas(trio)
    listening = asyncio.gather(*(audience.listen_until(over) for audience in audiences))
    for audience, take_away, balancer in zip(audiences, (drain, mark_down), balancers, strict=True):
        await until(lambda: min(audience.pieces) >= 5)  # noqa: B023
        assert set(audience.replicas) & replicas(leaver)
        await asyncio.to_thread(take_away, leaver, balancer)
        await until(lambda: set(audience.replicas) <= there)  # noqa: B023
    await asyncio.to_thread(leaver.stop)
    over.set()
    for heard, wholes in zip(await listening, undisturbed, strict=True):
        assert [set(answers) for answers in heard] == [{whole} for whole in wholes]


def drain(node: Cluster, _: LoadBalancer) -> None:
    address = httpx.get(f"{node.url}/v1/cluster", timeout=10).json()["ray_address"]
    subprocess.run([sys.executable, "-c", SERVE_DRAINS, address], check=True)
    assert httpx.get(f"{node.url}/-/healthz", timeout=10).status_code == 503


def mark_down(node: Cluster, balancer: LoadBalancer) -> None:
    address = node.url.removeprefix("http://")
    marked = balancer.config.read_text().replace(address, f"{address} down")
    balancer.config.write_text(marked)
    balancer.process.send_signal(signal.SIGHUP)  # nginx -s reload


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize("leaver", ["node"], indirect=True)
async def test_a_node_that_is_killed_breaks_its_own_streams_and_no_later_request(
    clients: list[AsyncOpenAI], leaver: Cluster
) -> None:
    """The last test of this node."""
    undisturbed = await asyncio.gather(
        *(each.listen() for each in audiences_of(clients, tokens=LONG))
    )
    audiences, lost = audiences_of(clients, tokens=LONG), replicas(leaver)
    doomed = leaver.processes()  # found before: that takes time, and an answer little
    listening = asyncio.gather(*(audience.listen_despite_errors() for audience in audiences))
    await until(lambda: all(min(audience.pieces) >= 5 for audience in audiences))
    kill_at_once(doomed)
    await asyncio.to_thread(
        psutil.wait_procs, doomed, timeout=10
    )  # until then, ports take requests
    await asyncio.gather(*(ask(client) for client in clients for _ in range(REQUESTS)))
    for audience, heard, wholes in zip(audiences, await listening, undisturbed, strict=True):
        broken = [isinstance(each, openai.APIError | httpx.HTTPError) for each in heard]
        assert broken == [replica in lost for replica in audience.replicas]
        assert 0 < sum(broken) < len(broken)
        assert all(
            each == whole
            for each, whole in zip(heard, wholes, strict=True)
            if isinstance(each, Received)
        )
