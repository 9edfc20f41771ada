"""What routers learn of conversations outlives them, in a real Redis."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest
from redis.asyncio import Redis

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.unreadable import Unreadable
from kvroute.router.sessions import learning
from kvroute.router.sessions.learning import Learning
from kvroute.router.sessions.returns import NOTHING_SAID, Counts, Returns, encode_counts
from kvroute.store.connection import connect
from kvroute.store.learned import Learned
from tests.support.waiting import until

KEY = "kvroute:{default/m}:learned"


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learning, "SAVE_S", 0.02)
    monkeypatch.setattr(learning, "RETRY_S", 0.02)


class Router:
    def __init__(self, redis: Redis) -> None:
        self.returns, self.unreadable = Returns(), Unreadable()
        work = Learning(Learned(redis, "m"), self.returns, self.unreadable).run()
        self.task = asyncio.create_task(work)


@pytest.fixture
async def tasks() -> AsyncIterator[list[asyncio.Task[None]]]:
    tasks: list[asyncio.Task[None]] = []
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_router_that_starts_goes_on_from_what_is_known(
    empty_redis: Redis, tasks: list[asyncio.Task[None]]
) -> None:
    first = Router(empty_redis)
    tasks.append(first.task)
    first.returns.counts.sent[0] = 100.0
    await until_redis(lambda: empty_redis.exists(KEY))
    first.task.cancel()
    second = Router(empty_redis)
    tasks.append(second.task)
    await until(lambda: second.returns.counts.sent[0] == 100.0)
    turn, keep, _ = second.returns.retention([Fingerprint(1)], 0, NOTHING_SAID, 1e6)
    second.returns.begin(turn, keep, 1e6)
    assert second.returns.counts.sent[0] == 101.0
    assert 0 < await empty_redis.ttl(KEY) <= 86_400


@pytest.mark.parametrize("rubbish", [b"\xc1", b"\x93\x90\x90\x90", encode_counts(Counts()) + b"x"])
async def test_what_cannot_be_read_is_replaced(
    empty_redis: Redis, tasks: list[asyncio.Task[None]], rubbish: bytes
) -> None:
    await empty_redis.set(KEY, rubbish)
    router = Router(empty_redis)
    tasks.append(router.task)
    await until_redis(lambda: _equals(empty_redis, encode_counts(Counts())))
    assert router.unreadable.counts["learned"] == 1


async def test_a_key_of_another_type_is_replaced(
    empty_redis: Redis, tasks: list[asyncio.Task[None]]
) -> None:
    await empty_redis.lpush(KEY, "x")
    router = Router(empty_redis)
    tasks.append(router.task)
    await until_redis(lambda: _has_type(empty_redis, b"string"))
    assert router.unreadable.counts["learned"] == 1


async def test_without_redis_it_waits(tasks: list[asyncio.Task[None]]) -> None:
    router = Router(connect("redis://127.0.0.1:1/0"))
    tasks.append(router.task)
    await asyncio.sleep(0.1)
    assert not router.task.done()


async def until_redis(asked: Callable[[], Awaitable[object]], within_s: float = 30.0) -> None:
    async with asyncio.timeout(within_s):
        while not await asked():
            await asyncio.sleep(0.01)


async def _equals(redis: Redis, wanted: bytes) -> bool:
    return await redis.type(KEY) == b"string" and await redis.get(KEY) == wanted


async def _has_type(redis: Redis, wanted: bytes) -> bool:
    return bool(await redis.type(KEY) == wanted)
