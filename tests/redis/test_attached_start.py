"""A replica waits for its attached server, and reports why it cannot use it."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.attached_engine import server_client as server_module
from kvroute.replica.attached_engine.attached import AttachedEngine
from kvroute.replica.attached_engine.start import start_attached
from kvroute.settings.replica import ReplicaSettings
from kvroute.store.attached_servers import AttachedServers
from tests.support.fake_vllm import BLOCK_SIZE, NAME, FakeServer, fake_servers

LEASE_S = 0.6  # a replica reports three times in this time


@pytest.fixture
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeServer]]:
    monkeypatch.setattr(server_module, "QUESTION_S", 0.5)
    with fake_servers(2) as two:
        yield two


def start(redis_url: str, **options: Any) -> "asyncio.Task[list[AttachedEngine]]":
    settings = ReplicaSettings(
        model=BUILTIN_MODEL,
        served_model_name="chat",
        server_model=NAME,
        redis_url=redis_url,
        cluster="c",
        block_size=BLOCK_SIZE,
        lease_s=LEASE_S,
        **options,
    )
    return asyncio.create_task(start_attached(settings, resolve(BUILTIN_MODEL), "r"))


async def lost(redis: Redis) -> dict[str, str]:
    return await AttachedServers(redis, "chat", cluster="c").away()


async def until_lost(redis: Redis, url: str, why: str) -> None:
    async with asyncio.timeout(60):
        while why not in (await lost(redis)).get(url, ""):
            await asyncio.sleep(0.02)


async def until_none_is_lost(redis: Redis) -> None:
    async with asyncio.timeout(60):
        while await lost(redis):
            await asyncio.sleep(0.02)


async def close(engines: list[AttachedEngine]) -> None:
    for engine in engines:
        await engine.close()


@pytest.mark.parametrize("is_silent", [False, True])
async def test_a_server_that_does_not_answer_is_used_when_it_does(
    servers: list[FakeServer], empty_redis: Redis, redis_url: str, is_silent: bool
) -> None:
    if is_silent:
        servers[0].start()
        servers[0].freeze()
    starting = start(redis_url, attach=[servers[0].url])
    await until_lost(empty_redis, servers[0].url, "does not answer")
    servers[0].start()
    engines = await starting
    await until_none_is_lost(empty_redis)
    await close(engines)


async def test_a_server_with_another_model_is_refused_until_it_serves_the_clusters(
    servers: list[FakeServer], empty_redis: Redis, redis_url: str
) -> None:
    servers[0].start("other")
    starting = start(redis_url, attach=[servers[0].url])
    await until_lost(empty_redis, servers[0].url, f"serves other, and this cluster serves {NAME}")
    servers[0].start(block_size=2 * BLOCK_SIZE)
    await until_lost(
        empty_redis, servers[0].url, f"start the server with --block-size {BLOCK_SIZE}"
    )
    assert not starting.done()
    servers[0].start()
    await close(await starting)


async def test_a_replica_whose_server_is_removed_from_the_list_takes_another(
    servers: list[FakeServer], empty_redis: Redis, redis_url: str, tmp_path: Path
) -> None:
    dead, running = servers
    running.start()
    listed = tmp_path / "servers.txt"
    listed.write_text(dead.url)
    starting = start(redis_url, attach_file=listed)
    await until_lost(empty_redis, dead.url, "does not answer")
    listed.write_text(running.url)
    (engine,) = await starting
    assert engine.facts.server == running.url
    await until_none_is_lost(empty_redis)
    await engine.close()


async def test_a_server_that_dies_later_is_reported_until_it_is_back(
    servers: list[FakeServer], empty_redis: Redis, redis_url: str
) -> None:
    servers[0].start()
    engines = await start(redis_url, attach=[servers[0].url])
    servers[0].kill()
    await until_lost(empty_redis, servers[0].url, "does not answer")
    servers[0].start()
    await until_none_is_lost(empty_redis)
    await close(engines)


async def test_the_report_of_a_replica_that_has_died_expires(empty_redis: Redis) -> None:
    servers = AttachedServers(empty_redis, "chat", cluster="c", lease_s=0.05)
    await servers.report("http://a:1", "http://a:1 does not answer; start it")
    lasting = AttachedServers(empty_redis, "chat", cluster="c", lease_s=60)
    await lasting.report("http://b:1", "2: it is\nbusy; wait")
    async with asyncio.timeout(60):
        while (left := await lost(empty_redis)) != {"http://b:1": "2: it is\nbusy; wait"}:
            assert left.keys() == {"http://a:1", "http://b:1"}
            await asyncio.sleep(0.01)
