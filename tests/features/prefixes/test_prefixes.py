"""Named prefixes on a real Redis: what is declared stays, and everybody agrees on who keeps it."""

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode
from redis.asyncio import Redis

from kvroute.contract.records import Load
from kvroute.features.prefixes.named_prefix import Prefix, assigned
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import Warm, warm_at
from kvroute.store.index import Index
from tests.support.records import DESCRIPTION

TEXT = {"prompt": "You are a lawyer."}
REPLICAS = [f"replica-{n}" for n in range(8)]


@pytest.fixture
def prefixes(empty_redis: Redis) -> Prefixes:
    return Prefixes(empty_redis, "a model")


def ids(tokens: int, first: int = 0) -> np.ndarray[Any, np.dtype[np.uint32]]:
    return np.arange(first, first + tokens, dtype=np.uint32)


async def declare(prefixes: Prefixes, id_: str, tokens: int = 100, **changes: Any) -> Prefix:
    return await prefixes.declare(
        Prefix(id_, 0, **{"token_ids": ids(tokens), "source": TEXT, **changes})
    )


async def names(prefixes: Prefixes) -> list[str]:
    return [prefix.name for prefix in await prefixes.all()]


async def test_what_was_declared_is_read_as_it_was(prefixes: Prefixes) -> None:
    source = {"messages": [{"role": "system", "content": "你是律师。"}]}
    declared = await prefixes.declare(
        Prefix("legal@v3", 0, ids(70_000), source, replicas=2, is_pinned=False)
    )
    (found,) = await prefixes.all()
    assert found == declared == Prefix("legal@v3", 1, ids(0), source, 2, is_pinned=False)
    assert found.token_ids.dtype == np.uint32
    assert found.token_ids.tolist() == list(range(70_000))
    assert (found.name, found.full_blocks(32)) == ("legal@v3@1", 2187)


async def test_only_the_terms_of_a_pin_in_host_memory_say_so(prefixes: Prefixes) -> None:
    await declare(prefixes, "own")
    await declare(prefixes, "host", is_in_host=True)
    packed = await prefixes._redis.hgetall(prefixes._values)
    order, rest = packed[b"own@1"].split(b",", 1)
    assert order.startswith(b'{"order":')
    assert rest == (
        b'"source":{"prompt":"You are a lawyer."},"replicas":null,"is_pinned":true,'
        b'"expires_at_s":null,"tenant":"","namespace":"","is_shared":false,'
        b'"version":1}'
    )
    assert b'"is_in_host":true' in packed[b"host@1"]
    assert [prefix.is_in_host for prefix in await prefixes.all()] == [False, True]


async def test_declared_again_it_is_the_next_version_unless_nothing_changed(
    prefixes: Prefixes,
) -> None:
    later = time.time() + 60
    first = await declare(prefixes, "a")
    assert await declare(prefixes, "a", expires_at_s=later) == Prefix(
        "a", 1, first.token_ids, TEXT, expires_at_s=later
    )
    assert (await declare(prefixes, "a", tokens=101)).version == 2
    assert (await declare(prefixes, "a", tokens=101, replicas=1)).version == 3
    assert (await declare(prefixes, "a", tokens=101, replicas=1, is_pinned=False)).version == 4
    assert await names(prefixes) == ["a@1", "a@2", "a@3", "a@4"]


async def test_no_name_ever_means_two_texts(prefixes: Prefixes) -> None:
    await declare(prefixes, "a")
    await prefixes.drop("a")
    assert (await declare(prefixes, "a", tokens=50)).name == "a@2"


async def test_declared_by_many_at_once_it_is_one(prefixes: Prefixes) -> None:
    found = await asyncio.gather(*(declare(prefixes, "a") for _ in range(10)))
    assert {prefix.version for prefix in found} == {1}
    found = await asyncio.gather(*(declare(prefixes, "a", tokens=n) for n in range(1, 11)))
    assert {prefix.version for prefix in found} == set(range(2, 12))


async def test_dropping_takes_all_versions_and_retiring_one(prefixes: Prefixes) -> None:
    for tokens in (1, 2, 3):
        await declare(prefixes, "a", tokens)
    await declare(prefixes, "b")
    await prefixes.retire("a", 2)
    assert await names(prefixes) == ["a@1", "a@3", "b@1"]
    assert await prefixes.drop("a")
    assert not await prefixes.drop("a")
    assert await names(prefixes) == ["b@1"]


async def test_what_expired_is_gone(prefixes: Prefixes) -> None:
    await declare(prefixes, "a", expires_at_s=time.time() - 1)
    await declare(prefixes, "b", expires_at_s=time.time() + 60)
    revision = await prefixes.revision()
    assert await names(prefixes) == ["b@1"]
    assert await prefixes.revision() != revision
    assert not await prefixes.drop("a")


async def test_a_clock_that_jumps_removes_nothing(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()
    await declare(prefixes, "b", expires_at_s=now_s + 60)
    await prefixes.revision()
    monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
    assert await names(prefixes) == ["b@1"]


async def test_every_change_is_another_revision(prefixes: Prefixes) -> None:
    revisions = [await prefixes.revision()]
    assert revisions == [0]
    for change in (
        declare(prefixes, "a"),
        declare(prefixes, "a", tokens=50),
        prefixes.retire("a", 1),
        prefixes.drop("a"),
    ):
        await change
        revisions.append(await prefixes.revision())
    assert len(set(revisions)) == len(revisions)


async def test_what_changes_nothing_is_no_revision(prefixes: Prefixes) -> None:
    await declare(prefixes, "a")
    revision = await prefixes.revision()
    await prefixes.retire("a", 9)
    await prefixes.drop("b")
    await prefixes.count({"a": (1, 2)})
    assert await prefixes.revision() == revision


async def test_a_redis_that_lost_them_gets_them_back_once(prefixes: Prefixes) -> None:
    await declare(prefixes, "b")
    await declare(prefixes, "a", replicas=1)
    before, revision = await prefixes.all(), await prefixes.revision()
    await prefixes._redis.flushall()
    assert await prefixes.revision() == 0
    await prefixes.restore(before)
    assert await prefixes.all() == before
    assert await prefixes.revision() not in (0, revision)
    await prefixes.drop("b")
    await prefixes.restore(before)
    assert await names(prefixes) == ["a@1"]
    assert (await declare(prefixes, "a", tokens=1)).version == 2


async def test_uses_add_up_until_the_prefix_is_dropped(prefixes: Prefixes) -> None:
    await declare(prefixes, "a")
    await prefixes.count({"a": (2, 64), "unknown": (1, 1)})
    await prefixes.count({"a": (1, 32)})
    await declare(prefixes, "a", tokens=5)
    await prefixes.retire("a", 1)
    assert await prefixes.uses() == {"a": (3, 96)}
    await prefixes.drop("a")
    assert await prefixes.uses() == {}


async def test_models_share_no_prefixes(prefixes: Prefixes) -> None:
    await declare(prefixes, "a")
    assert await Prefixes(prefixes._redis, "another model").all() == []


async def test_a_record_says_what_its_replica_keeps_warm(prefixes: Prefixes) -> None:
    index = Index(prefixes._redis, "a model")
    warm = {"a@1": Warm(3, is_pinned=True)}
    load = Load(features={"prefixes": encode(warm)})
    standing = await index.register("r", "1", description=DESCRIPTION, load=load, lease_s=5)
    assert [warm_at(record) for record in await index.records()] == [warm]
    for features in ({}, {"prefixes": b"garbage"}):
        await index.renew(standing, load=Load(features=features), lease_s=5)
        assert [warm_at(record) for record in await index.records()] == [{}]


def test_as_many_replicas_keep_a_prefix_as_it_asks_for() -> None:
    assert set(assigned(Prefix("a", 1, ids(1), TEXT), REPLICAS)) == set(REPLICAS)
    assert len(assigned(Prefix("a", 1, ids(1), TEXT, 2), REPLICAS)) == 2
    assert assigned(Prefix("a", 1, ids(1), TEXT, 2), REPLICAS[:1]) == REPLICAS[:1]


def test_everybody_finds_the_same_replicas_for_all_versions() -> None:
    first, second = Prefix("a", 1, ids(1), TEXT, 3), Prefix("a", 2, ids(2), TEXT, 3)
    assert assigned(first, REPLICAS) == assigned(second, reversed(REPLICAS))


def test_a_replica_that_leaves_moves_only_its_own_share() -> None:
    for n in range(100):
        prefix = Prefix(f"prefix-{n}", 1, ids(1), TEXT, 2)
        before, after = assigned(prefix, REPLICAS), assigned(prefix, REPLICAS[1:])
        assert set(before) - {REPLICAS[0]} <= set(after)


def test_prefixes_spread_over_the_replicas() -> None:
    prefixes = [Prefix(f"prefix-{n}", 1, ids(1), TEXT, 1) for n in range(400)]
    kept = [assigned(prefix, REPLICAS)[0] for prefix in prefixes]
    assert all(25 <= kept.count(name) <= 75 for name in REPLICAS)  # 50 each, give or take 3.8 sigma


async def test_a_prefix_without_tokens_is_skipped_and_can_be_dropped(
    prefixes: Prefixes, empty_redis: Redis
) -> None:
    for name in ("law", "roman"):
        await declare(prefixes, name)
    await empty_redis.hdel(prefixes._tokens, "law@1")
    assert await names(prefixes) == ["roman@1"]
    assert prefixes.unreadable.last["prefix"].name == "law@1"
    assert await prefixes.drop("law")
    assert prefixes.unreadable.counts["prefix"] == 1
