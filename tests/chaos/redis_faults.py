"""The faults of a cluster's Redis."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import redis.asyncio as redis

from kvroute.local.ports import free_port
from tests.chaos.victim import Fault, Victim


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


def commanded(before: str, after: str) -> Fault:
    """Return the fault that begins and ends with these Redis commands."""

    @asynccontextmanager
    async def fault(victim: Victim) -> AsyncIterator[None]:
        client: Any
        async with victim.redis as client:
            await client.execute_command(before)
            yield
            await client.execute_command(after)

    return fault


@asynccontextmanager
async def redis_rubbish(victim: Victim) -> AsyncIterator[None]:
    """Write random bytes to all keys and channels, again and again."""
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


REDIS_FAULTS: dict[str, Fault] = {
    "Redis is killed, and back empty": redis_away,
    "Redis is slow": redis_slow,
    "Redis is full": commanded("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
    "Redis is a replica for some time": commanded(
        f"REPLICAOF 127.0.0.1 {free_port()}", "REPLICAOF NO ONE"
    ),
    "Redis withdraws the permission to write": commanded(
        "ACL SETUSER default -@write", "ACL SETUSER default +@all"
    ),
    "Redis holds rubbish": redis_rubbish,
}
