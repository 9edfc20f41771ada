"""Several processes that share an engine publish its blocks one at a time."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress

from redis.asyncio import Redis

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.kv_events import BlockStored
from kvroute.replica.publisher import Publisher
from kvroute.store.index import FencedError, Index
from tests.support.records import DESCRIPTION, LOAD
from tests.support.waiting import until

LEASE_S = 1.0
LONG_S = 15.0  # a lease that does not expire when a process stands still for some seconds


@asynccontextmanager
async def published(
    redis: Redis, blocks: Sequence[int], *, lease_s: float = LEASE_S
) -> AsyncIterator[Publisher]:
    """Run a process that knows these blocks of the engine; at the end it is killed."""
    publisher = Publisher(
        Index(redis, "m"),
        BlockTable(),
        replica_id="a",
        description=DESCRIPTION,
        load=lambda: LOAD,
        lease_s=lease_s,
        is_shared=True,
    )
    learn(publisher, blocks)
    running = asyncio.create_task(publisher.run())
    try:
        yield publisher
    finally:
        running.cancel()
        await asyncio.wait([running])


def learn(publisher: Publisher, blocks: Sequence[int]) -> None:
    hashes = [bytes([block]) for block in blocks]
    publisher.publish([BlockStored(hashes, [Fingerprint(block) for block in blocks])])


async def in_index(redis: Redis) -> set[Fingerprint]:
    """Return the engine's blocks in the index."""
    index = Index(redis, "m")
    if (record := await index.record("a")) is None:
        return set()
    with suppress(FencedError):
        return {*(await index.blocks(record)).blocks}
    return set()


async def until_indexed(redis: Redis, blocks: set[int]) -> None:
    async with asyncio.timeout(60):
        while await in_index(redis) != {*map(Fingerprint, blocks)}:
            await asyncio.sleep(0.02)


async def test_a_process_that_starts_later_waits_and_then_goes_on(empty_redis: Redis) -> None:
    async with AsyncExitStack() as life:
        first = await life.enter_async_context(published(empty_redis, [1, 2], lease_s=LONG_S))
        await until_indexed(empty_redis, {1, 2})
        async with published(empty_redis, [3], lease_s=LONG_S) as second:
            await until(lambda: second._is_standby)
            for publisher in (first, second):
                learn(publisher, [4])
            await until_indexed(empty_redis, {1, 2, 4})
            assert (second.registrations, second.lag_s, second.lease_age_s) == (0, 0, 0)
            assert first.registrations == 1
            await life.aclose()
            await first.leave()
            await until_indexed(empty_redis, {3, 4})
            assert not second._is_standby


async def test_a_process_goes_on_when_the_lease_of_a_dead_one_has_expired(
    empty_redis: Redis,
) -> None:
    async with published(empty_redis, [1]):
        await until_indexed(empty_redis, {1})
    async with published(empty_redis, [2]):
        await until_indexed(empty_redis, {2})
