"""A copy in memory of values in Redis (kvroute/store/revision.py)."""

import asyncio
from typing import Any

import pytest
from redis.exceptions import RedisError

from kvroute.store.revision import Follower


class Store:
    """Values in a Redis that is not real."""

    def __init__(self, *values: str) -> None:
        self.values = [*values]
        self.number = 1
        self.reads = 0
        self.is_away = False

    async def revision(self) -> int:
        self.reads += 1
        await asyncio.sleep(0)
        if self.is_away:
            raise RedisError("away")
        return self.number

    async def all(self) -> list[str]:
        return [*self.values]

    async def restore(self, values: list[str]) -> None:
        self.values, self.number = [*values], self.number + 1

    def lose(self) -> None:
        self.values, self.number = [], 0


def follower(store: Any, *, restores: bool = True) -> Follower[str]:
    return Follower(store, restores=restores)


async def test_calls_at_the_same_time_share_one_read() -> None:
    store = Store("a")
    copy = follower(store)
    await asyncio.gather(*(copy.refresh() for _ in range(9)))
    assert (copy.values, store.reads) == (["a"], 2)  # one was under way when the others asked


async def test_calls_that_share_a_read_share_its_error() -> None:
    store = Store("a")
    copy, store.is_away = follower(store), True
    results = await asyncio.gather(*(copy.refresh() for _ in range(9)), return_exceptions=True)
    assert [type(result) for result in results] == 9 * [RedisError]
    assert store.reads == 2


async def test_a_call_does_not_take_the_result_of_a_read_that_was_cancelled() -> None:
    store = Store("a")
    copy = follower(store)
    first = asyncio.create_task(copy.refresh())
    second = asyncio.create_task(copy.refresh())
    await asyncio.sleep(0)
    first.cancel()
    await second
    assert copy.values == ["a"]


@pytest.mark.parametrize("restores", [True, False])
async def test_values_that_redis_loses_stay_in_the_copy(*, restores: bool) -> None:
    store = Store("a")
    copy = follower(store, restores=restores)
    await copy.refresh()
    complete_s = copy.complete_s
    store.lose()
    await copy.refresh()
    assert copy.values == ["a"]
    assert store.values == (["a"] if restores else [])
    assert (copy.complete_s > complete_s) == restores
