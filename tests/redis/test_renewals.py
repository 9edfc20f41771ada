"""A replica's load reaches its record soon, also when it changes during a write."""

import asyncio
from typing import Any

import pytest
from redis.asyncio import Redis

from kvroute.contract.records import Load
from kvroute.replica.block_table import BlockTable
from kvroute.replica.publisher import Publisher
from kvroute.store.index import Index
from kvroute.store.index_values import WriterState
from tests.support.records import DESCRIPTION, LOAD

LEASE_S = 60.0  # renewed by itself only long after what is tested


class Slow(Index):
    """Its writes of records wait until they may go on."""

    def __init__(self, redis: Redis) -> None:
        super().__init__(redis, "m")
        self.goes_on = asyncio.Event()
        self.begun = asyncio.Queue[str]()

    async def register(self, *args: Any, **options: Any) -> WriterState:
        await self._begin("register")
        return await super().register(*args, **options)

    async def renew(self, *args: Any, **options: Any) -> None:
        await self._begin("renew")
        await super().renew(*args, **options)

    async def _begin(self, name: str) -> None:
        self.begun.put_nowait(name)
        await self.goes_on.wait()


@pytest.mark.parametrize("write", ["register", "renew"])
async def test_a_change_during_a_write_is_written_after_it(empty_redis: Redis, write: str) -> None:
    index, loads = Slow(empty_redis), [LOAD]
    publisher = publisher_of(index, loads)
    running = asyncio.create_task(publisher.run())
    if write == "renew":
        index.goes_on.set()
        assert await index.begun.get() == "register"
        await until_written(index, LOAD)
        index.goes_on.clear()
        publisher.renew_soon()
    assert await index.begun.get() == write
    loads.append(Load(running=1))
    publisher.renew_soon()
    index.goes_on.set()
    await until_written(index, loads[-1])
    running.cancel()
    await asyncio.wait([running])


def publisher_of(index: Index, loads: list[Load]) -> Publisher:
    return Publisher(
        index,
        BlockTable(),
        replica_id="a",
        description=DESCRIPTION,
        load=lambda: loads[-1],
        lease_s=LEASE_S,
    )


async def until_written(index: Index, load: Load) -> None:
    async with asyncio.timeout(60):
        while (record := await index.record("a")) is None or record.load != load:
            await asyncio.sleep(0.01)
