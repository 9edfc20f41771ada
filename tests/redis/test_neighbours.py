"""A router that cannot write to Redis says so."""

import asyncio

import pytest
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.router.observability import neighbours as module
from kvroute.router.observability.neighbours import Neighbours
from kvroute.store.clusters import ClusterModel, Clusters
from tests.support.waiting import until

OWN = ClusterModel("cluster", "model", "127.0.0.1:1", "kvroute")


async def test_a_redis_without_memory_can_be_read_only(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SILENCE_S", 0.03)
    neighbours = Neighbours(Clusters(empty_redis, Unreadable()), OWN)
    announcing = asyncio.create_task(neighbours.run())
    try:
        await until(lambda: neighbours.can_write)
        await empty_redis.config_set("maxmemory", 1)
        await until(lambda: not neighbours.can_write)
        await empty_redis.config_set("maxmemory", 0)
        await until(lambda: neighbours.can_write)
    finally:
        await empty_redis.config_set("maxmemory", 0)
        announcing.cancel()
