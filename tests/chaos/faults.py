"""What may happen to a cluster, each from the beginning of a block to its end."""

import asyncio
import json
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import redis.asyncio as redis

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.own_disk import CAN_MOUNT, full_disk
from tests.support.redis_server import Wired

LEAVERS = 300
IDLE = 1000
SLOW = 100
LARGE = 4  # at once


@dataclass(frozen=True)
class Victim:
    """A cluster, and what a fault needs to know of it."""

    wired: Wired
    rng: random.Random

    @property
    def url(self) -> str:
        return self.wired.cluster.url

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").partition(":")
        return host, int(port)

    @property
    def redis(self) -> "redis.Redis":
        return redis.Redis(port=self.wired.port)

    def processes(self, title: str) -> list[psutil.Process]:
        """Those whose title or name contains this."""
        return self.wired.cluster.titled(title)

    def memory_bytes(self) -> int:
        """What routers and replicas have to themselves."""
        own = 0
        for process in self.processes("kvroute:Router") + self.processes("kvroute:Replica"):
            with suppress(psutil.Error):
                own += process.memory_full_info().uss
        return own

    def any_of(self, title: str) -> psutil.Process:
        return self.rng.choice(self.processes(title))


Fault = Callable[[Victim], AbstractAsyncContextManager[None]]


def sent(number: signal.Signals, title: str) -> Fault:
    """One process of that title gets a signal."""

    @asynccontextmanager
    async def fault(victim: Victim) -> AsyncIterator[None]:
        process = victim.any_of(title)
        process.send_signal(number)
        yield

    return fault


@asynccontextmanager
async def redis_away(victim: Victim) -> AsyncIterator[None]:
    victim.wired.server.close()
    yield
    victim.wired.start_redis()


@asynccontextmanager
async def redis_slow(victim: Victim) -> AsyncIterator[None]:
    victim.wired.wire.delay_s = 0.5
    yield
    victim.wired.wire.delay_s = 0.0


@asynccontextmanager
async def redis_full(victim: Victim) -> AsyncIterator[None]:
    async with victim.redis as client:
        await client.config_set("maxmemory", 1)
        yield
        await client.config_set("maxmemory", 0)


@asynccontextmanager
async def redis_rubbish(victim: Victim) -> AsyncIterator[None]:
    """Every key, and every channel, again and again."""
    over = asyncio.Event()
    spoiling = asyncio.create_task(_spoil(victim, over))
    yield
    over.set()
    await spoiling


async def _spoil(victim: Victim, over: asyncio.Event) -> None:
    async with victim.redis as client:
        while not over.is_set():
            for channel in await client.pubsub_channels():
                await client.publish(channel, victim.rng.randbytes(40))
            async for key in client.scan_iter("*"):
                with suppress(redis.ResponseError):  # the key is of another type now
                    await _spoil_key(client, key, victim.rng)
            await asyncio.sleep(0.5)


async def _spoil_key(client: Any, key: bytes, rng: random.Random) -> None:
    rubbish = rng.randbytes(20)
    kind = (await client.type(key)).decode()
    if kind == "string":
        await client.set(key, rubbish, keepttl=True)
    elif kind == "hash":
        await client.hset(key, rng.choice([*await client.hkeys(key), rubbish]), rubbish)
    elif kind == "stream":
        await client.xadd(key, {rubbish: rubbish})
    elif kind == "set":
        await client.sadd(key, rubbish)
    elif kind == "zset":
        await client.zadd(key, {rubbish: rng.random()})


@asynccontextmanager
async def disk_full(victim: Victim) -> AsyncIterator[None]:
    """The one of logs and request logs, which is the cluster's own."""
    with full_disk(victim.wired.cluster):
        yield


@asynccontextmanager
async def clients_leave(victim: Victim) -> AsyncIterator[None]:
    """Each amid its body."""
    connections = [await _half_a_request(victim) for _ in range(LEAVERS)]
    for writer in connections:
        writer.transport.abort()
    yield


@asynccontextmanager
async def idle_connections(victim: Victim) -> AsyncIterator[None]:
    connections = [(await asyncio.open_connection(*victim.address))[1] for _ in range(IDLE)]
    yield
    for writer in connections:
        writer.close()


@asynccontextmanager
async def slow_bodies(victim: Victim) -> AsyncIterator[None]:
    """A byte of each in a while."""
    connections = [await _half_a_request(victim) for _ in range(SLOW)]
    over = asyncio.Event()

    async def trickle() -> None:
        while not over.is_set():
            for writer in connections:
                writer.write(b" ")
            await asyncio.sleep(0.5)

    trickling = asyncio.create_task(trickle())
    yield
    over.set()
    await trickling
    for writer in connections:
        writer.transport.abort()


async def _half_a_request(victim: Victim) -> asyncio.StreamWriter:
    _, writer = await asyncio.open_connection(*victim.address)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 100000\r\n\r\n{"
    )
    await writer.drain()
    return writer


@asynccontextmanager
async def large_bodies(victim: Victim) -> AsyncIterator[None]:
    body = {"model": BUILTIN_MODEL, "messages": [{"role": "user", "content": ""}] * 300_000}
    content = json.dumps(body).encode()
    async with httpx.AsyncClient(base_url=victim.url, timeout=60) as client:
        await asyncio.gather(
            *(client.post("/v1/chat/completions", content=content) for _ in range(LARGE)),
            return_exceptions=True,
        )
        yield


FAULTS: dict[str, Fault] = {
    "a replica is killed": sent(signal.SIGKILL, "kvroute:Replica"),
    "a replica is stopped": sent(signal.SIGSTOP, "kvroute:Replica"),
    "Redis is killed, and back empty": redis_away,
    "Redis is slow": redis_slow,
    "Redis is full": redis_full,
    "Redis holds rubbish": redis_rubbish,
    "clients leave amid their bodies": clients_leave,
    "idle connections": idle_connections,
    "slow bodies": slow_bodies,
    "large bodies": large_bodies,
    "Serve's controller is killed": sent(signal.SIGKILL, "ServeController"),
    "Serve's proxy is killed": sent(signal.SIGKILL, "ray::ProxyActor"),
    "HAProxy is killed": sent(signal.SIGKILL, "haproxy/bin/haproxy"),
    "Serve's process beside HAProxy is killed": sent(signal.SIGKILL, "ray::HAProxyManager"),
    "a router is killed": sent(signal.SIGKILL, "kvroute:Router"),
}
if CAN_MOUNT:
    FAULTS["the disk is full"] = disk_full
BREAKING = (  # connections of clients
    "HAProxy is killed",
    "Serve's process beside HAProxy is killed",
    "a router is killed",
)
