"""What clients may do to a cluster, in a process of their own: streams are heard in this one."""

import asyncio
import json
import multiprocessing
import os
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from multiprocessing.connection import Connection
from typing import Any
from urllib.parse import urlsplit

import httpx

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.chaos.victim import Fault, Victim
from tests.support.hostile import FIELDS, GRAMMARS, SCHEMAS, bodies

LEAVERS = 300
SILENT = 1000  # connections that send nothing
IDLE = 6000  # connections that are left open behind a request
SLOW = 100
LARGE = 4  # at a time
HOSTILE = 4  # at a time
TINY = 50  # at a time
ANSWER_S = 600.0  # longest wait for an answer: several grammars are compiled on one core
NICE = 10  # lower priority of these clients: the cluster comes first
PROBE = b"GET /-/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n{"
CHAT = {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": "Hello"}]}

ClientFault = Callable[[str], AbstractAsyncContextManager[None]]  # of the cluster's URL


def apart(fault: ClientFault) -> Fault:
    """Have clients do this in another process, which fails when they get a wrong answer."""

    @asynccontextmanager
    async def running(victim: Victim) -> AsyncIterator[None]:
        here, there = multiprocessing.Pipe()
        spawning = multiprocessing.get_context("spawn")
        process = spawning.Process(target=_run, args=(fault, victim.url, there))
        process.start()
        await asyncio.to_thread(here.recv)  # it has begun
        yield
        here.send(None)
        await asyncio.to_thread(process.join)
        assert process.exitcode == 0, f"{fault.__name__} failed; its error is above"

    return running


def _run(fault: ClientFault, url: str, over: Connection) -> None:
    async def main() -> None:
        async with fault(url):
            over.send(None)
            await asyncio.to_thread(over.recv)

    os.nice(NICE)
    asyncio.run(main())


async def _connected(url: str, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Return a connection on which this was sent."""
    at = urlsplit(url)
    reader, writer = await asyncio.open_connection(at.hostname, at.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


@asynccontextmanager
async def clients_leave(url: str) -> AsyncIterator[None]:
    """Each amid its body."""
    connections = [await _connected(url, HALF) for _ in range(LEAVERS)]
    for _, writer in connections:
        writer.transport.abort()
    yield


@asynccontextmanager
async def idle_connections(url: str) -> AsyncIterator[None]:
    connections = [await _connected(url, b"") for _ in range(SILENT)]
    for _ in range(IDLE):
        reader, writer = await _connected(url, PROBE)
        assert b" 200 " in await reader.readline()
        connections.append((reader, writer))
    yield
    for _, writer in connections:
        writer.transport.abort()


@asynccontextmanager
async def slow_bodies(url: str) -> AsyncIterator[None]:
    """A byte of each in a while."""
    connections = [await _connected(url, HALF) for _ in range(SLOW)]

    async def trickle() -> None:
        while True:
            for _, writer in connections:
                if not writer.is_closing():
                    writer.write(b" ")
            await asyncio.sleep(0.5)

    trickling = asyncio.create_task(trickle())
    yield
    trickling.cancel()
    for _, writer in connections:
        writer.transport.abort()


@asynccontextmanager
async def large_bodies(url: str) -> AsyncIterator[None]:
    body = CHAT | {"messages": [{"role": "user", "content": ""}] * 300_000}
    await _ask(url, "/v1/chat/completions", [body] * LARGE, among=(400, 413), at_a_time=LARGE)
    yield


@asynccontextmanager
async def tiny_requests(url: str) -> AsyncIterator[None]:
    """Bursts of them until the end, and then a long prompt: none has to wait for its turn."""
    tiny = {"model": BUILTIN_MODEL, "max_tokens": 3}

    async def bursts() -> None:
        while True:
            prompts = [tiny | {"prompt": f"{number} of many"} for number in range(300)]
            await _ask(url, "/v1/completions", prompts, among=(200,), at_a_time=TINY)

    bursting = asyncio.create_task(bursts())
    yield
    bursting.cancel()
    await asyncio.wait([bursting])
    long = tiny | {"prompt": "A long one. " * 1000}
    await _ask(url, "/v1/completions", [long], among=(200,), at_a_time=1)


@asynccontextmanager
async def hostile_grammars(url: str) -> AsyncIterator[None]:
    async with _hostile(url, {*SCHEMAS, *GRAMMARS}):
        yield


@asynccontextmanager
async def hostile_fields(url: str) -> AsyncIterator[None]:
    async with _hostile(url, FIELDS.keys()):
        yield


@asynccontextmanager
async def _hostile(url: str, names: Collection[str]) -> AsyncIterator[None]:
    """Send each of these bodies once; the end waits for their answers."""
    asked = [CHAT | {"max_tokens": 4} | body for name, body in bodies() if name in names]
    among = (200, 400, 413)
    asking = _ask(url, "/v1/chat/completions", asked, among=among, at_a_time=HOSTILE)
    task = asyncio.create_task(asking)
    yield
    await task


async def _ask(
    url: str, path: str, asked: list[Any], *, among: Collection[int], at_a_time: int
) -> None:
    """Send these bodies. AssertionError for an answer whose status is not among these."""
    turns = asyncio.Semaphore(at_a_time)

    async def ask(body: Any) -> None:
        content = json.dumps(body).encode()
        async with turns:
            answer = await client.post(path, content=content)
        assert answer.status_code in among, (answer.status_code, answer.text[:300], content[:300])

    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=url, timeout=ANSWER_S, limits=limits) as client,
        asyncio.TaskGroup() as tasks,
    ):
        for body in asked:
            tasks.create_task(ask(body))


CLIENT_FAULTS: dict[str, Fault] = {
    "clients leave amid their bodies": apart(clients_leave),
    "7,000 idle connections": apart(idle_connections),
    "slow bodies": apart(slow_bodies),
    "large bodies": apart(large_bodies),
    "bursts of tiny requests, and a long one": apart(tiny_requests),
}
GRAMMAR_FAULTS: dict[str, Fault] = {  # for engines that compile grammars
    "hostile schemas and grammars": apart(hostile_grammars),
    "hostile tools, templates and lists": apart(hostile_fields),
}
