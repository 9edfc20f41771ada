"""A router knows every prefix by heart: which version to use, which to let go, what Redis lost."""

import asyncio
import random
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode
from redis.exceptions import RedisError

from kvroute.contract.records import Load
from kvroute.features.prefixes.catalogue import Catalogue
from kvroute.features.prefixes.composer import PrefixComposer
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.features.prefixes.prefix_options import Task
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import Warm
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.fleet import Fleet
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.store.connection import connect
from tests.support.records import record
from tests.support.waiting import until

BLOCK = 4
NOWHERE = Prefixes(connect("redis://127.0.0.1:1"), "m")


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[Prefixes]:
    """Of a model of the test's own."""
    client = connect(redis_url)
    yield Prefixes(client, uuid.uuid4().hex)
    await client.flushall()
    await client.aclose()


@pytest.fixture
def fleet() -> Fleet:
    """What all routers of a test know of the replicas: none so far."""
    return Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(1))


@pytest.fixture
def known(store: Prefixes, fleet: Fleet) -> Catalogue:
    return Catalogue(store, fleet, block_size=BLOCK)


@pytest.fixture
def composer(prompts: Prompts) -> PrefixComposer:
    return PrefixComposer(prompts)


def see(fleet: Fleet, **warm: Mapping[str, Warm]) -> None:
    """There are these replicas, which keep that warm."""
    fleet.update(
        record(id_, load=Load(features={"prefixes": encode(pins)})) for id_, pins in warm.items()
    )


def warm(*names: str) -> dict[str, Warm]:
    return {name: Warm(blocks=5, is_pinned=True) for name in names}


async def declare(store: Prefixes, id_: str, *, tokens: int = 20, **more: Any) -> Prefix:
    """Other tokens each time."""
    token_ids = np.random.default_rng().integers(0, 1000, tokens).astype(np.uint32)
    return await store.declare(Prefix(id_, 0, token_ids, {"prompt": "?"}, **more))


async def test_a_router_that_knows_nothing_yet_looks_before_it_refuses(
    store: Prefixes, known: Catalogue
) -> None:
    await declare(store, "law")
    assert (await known.named("task_id", "law")).version == 1


async def test_a_name_declared_a_moment_ago_is_found_at_once(
    store: Prefixes, known: Catalogue
) -> None:
    await known.refresh()
    await declare(store, "law")
    assert (await known.named("task_id", "law")).version == 1


async def test_an_unknown_name_is_refused_with_those_that_look_like_it(
    store: Prefixes, known: Catalogue
) -> None:
    for id_ in ("legal-v3", "legal-v4", "medical"):
        await declare(store, id_)
    complaint = r"prefix_id is 'legal-v33'.*'legal-v3' or 'legal-v4'\?"
    with pytest.raises(ApiError, match=complaint) as refusal:
        await known.named("prefix_id", "legal-v33")
    assert (refusal.value.status, refusal.value.param) == (404, "prefix_id")


async def test_a_known_name_needs_no_redis(store: Prefixes, known: Catalogue) -> None:
    await declare(store, "law")
    await known.refresh()
    known.store = NOWHERE
    assert (await known.named("task_id", "law")).version == 1
    with pytest.raises(ApiError, match="no prefix of this name"):
        await known.named("task_id", "lawn")


async def test_without_redis_a_router_that_never_read_it_does_not_know(fleet: Fleet) -> None:
    known = Catalogue(NOWHERE, fleet, block_size=BLOCK)
    with pytest.raises(ApiError, match="Redis is away") as refusal:
        await known.named("task_id", "law")
    assert refusal.value.status == 503


async def test_the_old_version_is_used_until_the_new_one_is_warm_everywhere(
    store: Prefixes, known: Catalogue, fleet: Fleet
) -> None:
    await declare(store, "law")
    await declare(store, "law")
    see(fleet, a=warm("law@1"), b=warm("law@1", "law@2"))
    assert (await known.named("task_id", "law")).version == 1
    see(fleet, a=warm("law@1", "law@2"), b=warm("law@1", "law@2"))
    assert (await known.named("task_id", "law")).version == 2


async def test_where_none_is_warm_the_newest_is_used(
    store: Prefixes, known: Catalogue, fleet: Fleet
) -> None:
    await declare(store, "law")
    await declare(store, "law")
    assert (await known.named("task_id", "law")).version == 2
    see(fleet, a={})
    assert (await known.named("task_id", "law")).version == 2


async def test_half_warm_is_not_warm(store: Prefixes, known: Catalogue, fleet: Fleet) -> None:
    await declare(store, "law")
    await declare(store, "law")
    see(fleet, a={**warm("law@1"), "law@2": Warm(blocks=4, is_pinned=True)})
    assert (await known.named("task_id", "law")).version == 1


async def test_a_prefix_whose_time_is_over_is_unknown(store: Prefixes, known: Catalogue) -> None:
    await declare(store, "law", expires_at_s=time.time() + 3.0)
    assert await known.named("task_id", "law")
    await until(lambda: known.get("law") is None)


@asynccontextmanager
async def running(known: Catalogue, composer: Any = None, *tasks: Task) -> AsyncIterator[None]:
    task = asyncio.create_task(known.run(tasks, composer))
    yield
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_old_versions_are_let_go_once_the_new_one_is_in_use(
    store: Prefixes, known: Catalogue, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.catalogue.RETIRE_S", 0.1)
    for _ in range(3):
        await declare(store, "law")
    see(fleet, a=warm("law@1"))
    async with running(known):
        await until(lambda: known.get("law"))
        see(fleet, a=warm("law@1", "law@3"))
        await until(lambda: [prefix.version for prefix in known.all()] == [3])
    assert [prefix.version for prefix in await store.all()] == [3]


async def test_a_prefix_that_is_declared_again_and_again_keeps_few_versions(
    store: Prefixes, known: Catalogue, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new version is warm before the one before it has been in use for RETIRE_S."""
    monkeypatch.setattr("kvroute.features.prefixes.catalogue.RETIRE_S", 3.0)
    names: list[str] = []
    async with running(known):
        for version in range(1, 60):
            await declare(store, "law")
            names.append(f"law@{version}")
            see(fleet, a=warm(*names))
            await until(lambda: (latest := known.latest("law")) and latest.version >= len(names))
            if known.all()[0].version > 1:
                break
    assert known.all()[0].version > 1


async def test_what_redis_lost_is_given_back(
    store: Prefixes, known: Catalogue, redis_url: str
) -> None:
    await declare(store, "law")
    lost = await declare(store, "law", replicas=2)
    async with running(known):
        await until(lambda: len(known.all()) == 2)
        client = connect(redis_url)
        await client.flushall()
        await client.aclose()
        async with asyncio.timeout(60):
            while len(found := await store.all()) < 2:
                await asyncio.sleep(0.01)
    assert found[1] == lost
    assert found[1].token_ids.tolist() == lost.token_ids.tolist()


TASK = Task(task_id="1", prompt="You are a lawyer.")


async def test_tasks_are_declared_once_however_many_routers_start(
    store: Prefixes, fleet: Fleet, composer: PrefixComposer
) -> None:
    routers = [Catalogue(store, fleet, block_size=BLOCK) for _ in range(3)]
    async with running(routers[0], composer, TASK), running(routers[1], composer, TASK):
        await until(lambda: routers[0].get("1") and routers[1].get("1"))
    async with running(routers[2], composer, TASK):
        await until(lambda: routers[2].get("1"))
    assert [prefix.name for prefix in await store.all()] == ["1@1"]


async def test_a_task_declared_otherwise_since_stays_so(
    store: Prefixes, known: Catalogue, composer: PrefixComposer
) -> None:
    await declare(store, "1")
    async with running(known, composer, TASK, TASK.model_copy(update={"task_id": "2"})):
        await until(lambda: known.get("2"))
    assert [prefix.name for prefix in await store.all()] == ["1@1", "2@1"]


async def test_uses_are_added_up_over_routers(store: Prefixes, fleet: Fleet) -> None:
    prefix = await declare(store, "law", tokens=22)
    for known in [Catalogue(store, fleet, block_size=BLOCK) for _ in range(2)]:
        known.count(prefix, cached_tokens=0)
        known.count(prefix, cached_tokens=8)
        known.count(prefix, cached_tokens=400)
        await known.flush()
        await known.flush()
    assert await store.uses() == {"law": (4, 2 * (8 + 20))}


async def test_uses_wait_for_redis(store: Prefixes, known: Catalogue) -> None:
    prefix = await declare(store, "law")
    known.store = NOWHERE
    known.count(prefix, cached_tokens=8)
    with pytest.raises(RedisError):
        await known.flush()
    known.count(prefix, cached_tokens=4)
    known.store = store
    await known.flush()
    assert await store.uses() == {"law": (2, 12)}


async def test_what_a_prefix_saved_is_told_as_long_as_it_is_declared(
    store: Prefixes, known: Catalogue
) -> None:
    prefix = await declare(store, "law", tokens=22)
    await known.refresh()
    assert known.saved_tokens() == {"law": 0}
    known.count(prefix, cached_tokens=400)
    assert known.saved_tokens() == {"law": 20}
    await store.drop("law")
    await known.refresh()
    assert known.saved_tokens() == {}
