"""Routers agree on the LoRA adapters that were added, and remove one after its last request."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.asyncio import Redis

from kvroute.features.adapters.adapter_directory import AdapterDirectory
from kvroute.features.adapters.adapter_store import Adapters, NameTakenError
from kvroute.features.adapters.added import AddedAdapter
from kvroute.store.connection import connect
from kvroute.store.keys import key_prefix
from tests.support.waiting import until


def adapter(name: str, digest: str = "a", tenant: str = "", **fields: bool) -> AddedAdapter:
    path = f"/adapters/{name}"
    return AddedAdapter(name=name, path=path, digest=32 * digest, rank=8, tenant=tenant, **fields)


@pytest.fixture
def store(redis: Redis) -> Adapters:
    return Adapters(redis, uuid.uuid4().hex)


class Router:
    """The directory of one of several routers, which run or not."""

    running: set[str]

    def __init__(self, store: Adapters, name: str, running: set[str]) -> None:
        self.directory = AdapterDirectory(store, name, self._routers)
        self._running = running

    async def _routers(self) -> set[str]:
        return self._running

    @contextmanager
    def following(self) -> Iterator[AdapterDirectory]:
        task = asyncio.create_task(self.directory.run())
        try:
            yield self.directory
        finally:
            task.cancel()


async def test_an_adapter_comes_back_as_it_was_added(store: Adapters) -> None:
    await store.add(adapter("sql", is_warm=True))
    await store.add(adapter("sql", tenant="acme"))
    assert {each.key: each for each in await store.all()} == {
        "sql@" + 32 * "a": adapter("sql", is_warm=True),
        "acme␟sql@" + 32 * "a": adapter("sql", tenant="acme"),
    }


async def test_a_name_is_added_once_unless_it_is_replaced(store: Adapters) -> None:
    await store.add(adapter("sql", "a"))
    with pytest.raises(NameTakenError):
        await store.add(adapter("sql", "b"))
    await store.add(adapter("sql", "b"), replaces=True)
    assert {(each.digest[0], each.is_leaving) for each in await store.all()} == {
        ("a", True),
        ("b", False),
    }


async def test_an_adapter_that_is_being_removed_cannot_be_added_again_yet(store: Adapters) -> None:
    await store.add(adapter("sql"))
    assert await store.leave(adapter("sql").key)
    with pytest.raises(NameTakenError):
        await store.add(adapter("sql"), replaces=True)


async def test_an_unreadable_adapter_is_counted_and_skipped(store: Adapters, redis: Redis) -> None:
    await store.add(adapter("sql"))
    await redis.hset(store._values, "law@x", b'{"version": 1}')
    assert [each.name for each in await store.all()] == ["sql"]
    assert store.unreadable.counts["adapter"] == 1


async def test_other_routers_find_a_new_adapter_and_lose_a_removed_one(store: Adapters) -> None:
    running = {"a", "b"}
    with (
        Router(store, "a", running).following() as one,
        Router(store, "b", running).following() as other,
    ):
        await store.add(adapter("sql"))
        await until(lambda: one.find("sql") == other.find("sql") == adapter("sql"))
        await store.leave(adapter("sql").key)
        await until(lambda: not (one.all or other.all))
    assert await store.all() == []


async def test_a_removal_waits_for_the_requests_of_every_running_router(store: Adapters) -> None:
    running = {"a", "b", "killed"}
    key = adapter("sql").key
    await store.add(adapter("sql"))
    with (
        Router(store, "a", running).following() as one,
        Router(store, "b", running).following() as other,
    ):
        await until(lambda: one.get(key) is not None and other.get(key) is not None)
        with other.uses.use(key):
            await store.leave(key)
            await until(lambda: one.find("sql") is None and other.find("sql") is None)
            running.discard("killed")
            await until(lambda: one._reported == {key})
            assert one.get(key) is not None
        await until(lambda: one.get(key) is None and other.get(key) is None)


async def test_a_router_that_died_does_not_stop_a_removal(store: Adapters) -> None:
    running = {"a", "dead"}
    key = adapter("sql").key
    await store.add(adapter("sql"))
    await store.leave(key)
    with Router(store, "a", running).following() as one:
        await until(lambda: one._reported == {key})
        assert one.get(key) is not None
        running.discard("dead")
        await until(lambda: one.get(key) is None)


async def test_adapters_that_redis_has_lost_are_restored(store: Adapters, redis: Redis) -> None:
    directory = Router(store, "a", set()).directory
    await store.add(adapter("sql"))
    await directory.refresh()
    await redis.flushall()
    await directory.refresh()
    assert await store.all() == [adapter("sql")]


async def test_a_report_of_an_adapter_that_is_gone_leaves_nothing_behind(
    store: Adapters, redis: Redis
) -> None:
    await store.is_unused(adapter("sql").key, "a")
    assert await redis.keys(f"{key_prefix('default', '*')}:adapters:unused") == []


async def test_a_tenant_finds_its_own_adapter_before_that_of_all(store: Adapters) -> None:
    directory = Router(store, "a", set()).directory
    for each in (adapter("sql", "a"), adapter("sql", "b", "acme"), adapter("law", "c", "acme")):
        await store.add(each)
    await directory.refresh()
    found = {tenant: directory.find("sql", tenant) for tenant in ("", "acme", "other")}
    assert {tenant: each and each.digest[0] for tenant, each in found.items()} == {
        "": "a",
        "acme": "b",
        "other": "a",
    }
    assert directory.find("law", "other") is None
    assert {each.digest[0] for each in directory.usable("acme")} == {"b", "c"}
    assert [each.digest[0] for each in directory.usable()] == ["a"]


class Fleet:
    """Routers that run in turn: one step of one router at a time."""

    def __init__(self, store: Adapters) -> None:
        self.store = store
        self.running = {"a", "b", "c"}
        self.routers = {name: Router(store, name, self.running).directory for name in self.running}
        self.requests: dict[str, list[tuple[str, ExitStack]]] = {name: [] for name in self.running}

    async def add(self, router: str, name: str, digest: str) -> None:
        with suppress(NameTakenError):
            await self.store.add(adapter(name, digest), replaces=True)

    async def leave(self, router: str, name: str, digest: str) -> None:
        await self.store.leave(adapter(name, digest).key)

    async def poll(self, router: str, name: str, digest: str) -> None:
        if router in self.running:
            await self.routers[router].refresh()
            await self.routers[router]._remove_unused()

    async def begin(self, router: str, name: str, digest: str) -> None:
        directory = self.routers[router]
        if router in self.running and (found := directory.find(name)):
            stack = ExitStack()
            stack.enter_context(directory.uses.use(found.key))
            self.requests[router].append((found.key, stack))

    async def end(self, router: str, name: str, digest: str) -> None:
        if self.requests[router]:
            self.requests[router].pop(0)[1].close()

    async def die(self, router: str, name: str, digest: str) -> None:
        if len(self.running) > 1:
            self.running.discard(router)

    async def used(self) -> set[str]:
        return {key for router in self.running for key, _ in self.requests[router]}


STEPS = ("add", "leave", "poll", "poll", "poll", "begin", "begin", "end", "die")


@given(
    st.lists(
        st.tuples(
            st.sampled_from(STEPS),
            st.sampled_from("abc"),
            st.sampled_from(("sql", "law")),
            st.sampled_from("12"),
        ),
        max_size=40,
    )
)
def test_an_adapter_stays_while_a_running_router_uses_it_and_goes_afterwards(
    redis_url: str, steps: list[tuple[str, str, str, str]]
) -> None:
    async def check() -> None:
        client = connect(redis_url)
        fleet = Fleet(Adapters(client, uuid.uuid4().hex))
        try:
            for step, *given_to in steps:
                await getattr(fleet, step)(*given_to)
                assert await fleet.used() <= {each.key for each in await fleet.store.all()}
            for router in fleet.running:
                while fleet.requests[router]:
                    await fleet.end(router, "", "")
            for router in [*fleet.running, *fleet.running]:
                await fleet.poll(router, "", "")
            assert not [each for each in await fleet.store.all() if each.is_leaving]
        finally:
            await client.aclose()

    asyncio.run(check())
