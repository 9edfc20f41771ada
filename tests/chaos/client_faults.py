"""Faults that clients cause. They run in another process, since this process reads streams."""

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

LEAVERS = 300  # number of clients that leave during their request
SILENT = 1000  # number of connections that send nothing
IDLE = 6000  # number of connections that stay open after a request
SLOW = 100  # number of clients that send their body slowly
LARGE = 4  # number of large bodies, which are sent at the same time
HOSTILE = 4  # number of hostile bodies that are sent at the same time
LONG = 24  # number of long answers at the same time
TINY = 50  # number of tiny requests that are sent at the same time
# Timeout of an answer in seconds. It is long because several grammars are compiled on one core, at
# low priority.
ANSWER_S = 1800.0
NICE = 10  # niceness of these clients, so that the cluster gets the CPU first
# A request without a body, and the first part of a request with one.
PROBE = b"GET /-/healthz HTTP/1.1\r\nhost: localhost\r\n\r\n"
HALF = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n{"
CHAT = {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": "Hello"}]}

# A fault by clients. Gets the cluster's URL; lasts until the context ends.
ClientFault = Callable[[str], AbstractAsyncContextManager[None]]


def apart(fault: ClientFault) -> Fault:
    """Return the fault, run in another process.

    The end of the context fails if a client got a wrong response.
    """

    @asynccontextmanager
    async def running(victim: Victim) -> AsyncIterator[None]:
        here, there = multiprocessing.Pipe()
        spawning = multiprocessing.get_context("spawn")
        process = spawning.Process(target=_run, args=(fault, victim.url, there))
        process.start()
        await asyncio.to_thread(here.recv)  # wait until the fault has begun
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
    """Open a connection and send this data."""
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(data)
    await writer.drain()
    return reader, writer


@asynccontextmanager
async def clients_leave(url: str) -> AsyncIterator[None]:
    """Clients leave after a part of their body."""
    connections = [await _connected(url, HALF) for _ in range(LEAVERS)]
    for _, writer in connections:
        writer.transport.abort()
    yield


@asynccontextmanager
async def idle_connections(url: str) -> AsyncIterator[None]:
    """Clients leave connections open, with and without an earlier request."""
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
    """Clients send their body byte by byte, with long pauses."""
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
    """Clients send large bodies with very many messages."""
    body = CHAT | {"messages": [{"role": "user", "content": ""}] * 300_000}
    await _ask(url, "/v1/chat/completions", [body] * LARGE, among=(400, 413), at_a_time=LARGE)
    yield


@asynccontextmanager
async def tiny_requests(url: str) -> AsyncIterator[None]:
    """Clients send bursts of tiny requests, and a long prompt at the end. All must be answered."""
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
async def long_answers(url: str) -> AsyncIterator[None]:
    """Clients ask for long answers, which hold all caches, and leave at the end of the fault."""
    long = {"model": BUILTIN_MODEL, "max_tokens": 2000, "ignore_eos": True}
    asked = [long | {"prompt": f"story {number}"} for number in range(LONG)]
    asking = _ask(url, "/v1/completions", asked, among=(200, 429), at_a_time=LONG)
    task = asyncio.create_task(asking)
    yield
    task.cancel()
    await asyncio.wait([task])


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
    """Send each of these bodies once. The end of the context waits for the responses."""
    asked = [CHAT | {"max_tokens": 4} | body for name, body in bodies() if name in names]
    among = (200, 400, 413)
    asking = _ask(url, "/v1/chat/completions", asked, among=among, at_a_time=HOSTILE)
    task = asyncio.create_task(asking)
    yield
    await task


async def _ask(
    url: str, path: str, asked: list[Any], *, among: Collection[int], at_a_time: int
) -> None:
    """Send these bodies, `at_a_time` at once.

    Raises:
        AssertionError: The status of a response is not in `among`.
    """
    parallel = asyncio.Semaphore(at_a_time)

    async def ask(body: Any) -> None:
        content = json.dumps(body).encode()
        async with parallel:
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
MEMORY_FAULTS: dict[str, Fault] = {  # for engines with small caches
    "long answers hold the caches": apart(long_answers),
}
GRAMMAR_FAULTS: dict[str, Fault] = {  # for engines that compile grammars
    "hostile schemas and grammars": apart(hostile_grammars),
    "hostile tools, templates and lists": apart(hostile_fields),
}
