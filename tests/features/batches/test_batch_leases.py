"""The leases of batches and the list of folders in Redis."""

from redis.asyncio import Redis

from kvroute.features.batches.batch_leases import BatchLeases
from kvroute.features.batches.stores.file_places import FilePlaces


async def test_one_router_at_a_time_has_a_lease(empty_redis: Redis) -> None:
    first, second = BatchLeases(empty_redis, "first"), BatchLeases(empty_redis, "second")
    assert await first.take("b")
    assert await first.take("b")
    assert not await second.take("b")
    assert await second.take("other")
    await second.release("b")
    assert not await second.take("b")
    await first.release("b")
    assert await second.take("b")


async def test_a_lease_ends_without_a_renewal(empty_redis: Redis) -> None:
    first, second = BatchLeases(empty_redis, "first"), BatchLeases(empty_redis, "second")
    await first.take("b")
    (key,) = await empty_redis.keys("*batch*")
    assert 0 < await empty_redis.pttl(key) <= 6000
    await empty_redis.pexpire(key, 1)
    while await empty_redis.exists(key):
        pass
    assert await second.take("b")
    assert not await first.take("b")


async def test_different_folders_are_noticed(empty_redis: Redis) -> None:
    places = FilePlaces(empty_redis)
    assert await places.announce("a") == 1
    assert await places.announce("a") == 1
    assert await places.announce("b") == 2
    assert await FilePlaces(empty_redis, cluster="another").announce("c") == 1
