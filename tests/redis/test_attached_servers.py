"""Each attached server has one replica, also after a replica has died."""

import asyncio

from redis.asyncio import Redis

from kvroute.replica.attached_engine.claim import claim
from kvroute.store.attached_servers import AttachedServers

URLS = ["http://a:1", "http://b:1"]


def servers(client: Redis, *, model: str = "m", lease_s: float = 30.0) -> AttachedServers:
    return AttachedServers(client, model, lease_s=lease_s)


async def test_replicas_take_different_servers(empty_redis: Redis) -> None:
    claims = await asyncio.gather(
        *(claim(servers(empty_redis), lambda: URLS, name) for name in "xy")
    )
    assert {taken.url for taken in claims} == {*URLS}
    assert await servers(empty_redis).claim(URLS, "z") is None


async def test_models_do_not_share_claims(empty_redis: Redis) -> None:
    assert await servers(empty_redis).claim(URLS, "x") == URLS[0]
    assert await servers(empty_redis, model="other").claim(URLS, "x") == URLS[0]


async def test_a_released_server_is_free_at_once(empty_redis: Redis) -> None:
    held = await claim(servers(empty_redis), lambda: URLS[:1], "x")
    await servers(empty_redis).release(URLS[0], "another replica")
    assert await servers(empty_redis).claim(URLS[:1], "y") is None
    await held.close()
    assert await servers(empty_redis).claim(URLS[:1], "y") == URLS[0]


async def test_the_claim_of_a_dead_replica_expires(empty_redis: Redis) -> None:
    assert await servers(empty_redis, lease_s=0.05).claim(URLS[:1], "x") == URLS[0]
    taken = await asyncio.wait_for(claim(servers(empty_redis), lambda: URLS[:1], "y"), timeout=20)
    assert taken.url == URLS[0]


async def test_a_claim_is_kept_through_a_loss_of_all_data(empty_redis: Redis) -> None:
    held = await claim(servers(empty_redis, lease_s=6.0), lambda: URLS[:1], "x")
    await empty_redis.flushall()
    while await empty_redis.keys() == []:
        await asyncio.sleep(0.01)
    assert await servers(empty_redis).claim(URLS[:1], "y") is None
    await held.close()


async def test_a_replica_notices_that_another_one_has_its_server(empty_redis: Redis) -> None:
    held = await claim(servers(empty_redis, lease_s=0.3), lambda: URLS[:1], "x")
    await empty_redis.flushall()
    assert await servers(empty_redis).claim(URLS[:1], "y") == URLS[0]
    assert "another replica" in await held.lost()
    assert "another replica" in held.problem()


async def test_a_server_that_is_no_longer_listed_is_given_up(empty_redis: Redis) -> None:
    listed = [*URLS]
    held = await claim(servers(empty_redis, lease_s=0.03), lambda: listed, "x")
    listed.remove(held.url)
    assert "no longer in the list" in await held.lost()
