"""Whatever is in Redis: what can be read is read, the rest is counted, and the index heals."""

import asyncio
import contextlib
import json
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract import messages
from kvroute.contract.messages import Dispatch, Fingerprints, RouterMessage
from kvroute.contract.records import (
    VERSION,
    Description,
    Load,
    ProcessLocation,
    RouterDescription,
)
from kvroute.contract.unreadable import Unreadable
from kvroute.features.prefixes.catalogue import Catalogue
from kvroute.features.prefixes.named_prefix import Prefix
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.kv_events import BlockStored
from kvroute.replica.publisher import Publisher
from kvroute.router.connections.peers import PeerSubscriber
from kvroute.router.index.feed import Feed
from kvroute.router.index.handshake import Handshake
from kvroute.router.placement.fleet import Fleet
from kvroute.store.clusters import KEY, ClusterModel, Clusters
from kvroute.store.connection import connect
from kvroute.store.index import FencedError, Index
from kvroute.store.index_values import START
from kvroute.store.keys import key_prefix
from tests.support.mirrors import held_by
from tests.support.records import DESCRIPTION, FACTS, LOAD, facts
from tests.support.waiting import until

MODEL = "m"
PREFIX = key_prefix("default", MODEL)
LEASE_S = 0.3
HEALED_S = 60.0
BLOCKS = [Fingerprint(2**63 + i) for i in range(10)]
WAYS = settings(suppress_health_check=list(HealthCheck))


def as_json(value: object) -> bytes:
    return json.dumps(value).encode()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
).map(as_json)


@st.composite
def bent(draw: st.DrawFn, whole: bytes) -> bytes:
    """The JSON object with one of its fields, at any depth, left out or replaced."""
    found = json.loads(whole)
    here = found
    while True:
        name = draw(st.sampled_from(sorted(here)))
        if not (isinstance(here[name], dict) and here[name] and draw(st.booleans())):
            break
        here = here[name]
    if draw(st.booleans()):
        del here[name]
    else:
        here[name] = json.loads(draw(values))
    return json.dumps(found).encode()


EVERY_LOAD = Load(1, 2, 3, ("sql",), 0.5, 4, 1e9)  # no field with its default, which is left out
TERMS = b'{"order": 7, "source": {"prompt": "a"}, "replicas": 1, "version": 1}'
rubbish = st.one_of(
    st.binary(max_size=40),
    values,
    bent(msgspec.json.encode(DESCRIPTION)),
    bent(msgspec.json.encode(EVERY_LOAD)),
    bent(TERMS),
)
replicas = st.sampled_from(["a", "x"])
names = st.binary(min_size=1, max_size=12) | st.sampled_from([b"law@1", b"old@1", b"law@2"])
hashes = st.sampled_from([f"prefixes{kind}" for kind in ("", ":tokens", ":hits", ":saved")])
fields = st.sampled_from(["incarnation", "seq", "facts", "load", "more"])
entries = st.dictionaries(
    st.sampled_from(["r", "i", "s", "j", "l", "c", "a", "d", "more"]),
    st.one_of(st.sampled_from([b"a", b"x", b"1", b"2"]), st.binary(max_size=20)),
    min_size=1,
)
acts = st.one_of(
    st.tuples(st.just("hset"), replicas.map("replica:{}".format), fields, rubbish),
    st.tuples(st.just("hset"), hashes, names, rubbish),
    st.tuples(st.just("hset"), st.just("prefixes:versions"), st.just("law"), rubbish),
    st.tuples(st.just("set"), st.just("prefixes:revision"), rubbish),
    st.tuples(st.just("set"), st.sampled_from(["router:x", "router:r"]), rubbish),
    st.tuples(st.just("sadd"), st.sampled_from(["replicas", "router-ids"]), rubbish),
    st.tuples(st.just("sadd"), st.just("blocks:a:1"), st.binary(max_size=20)),
    st.tuples(st.just("xadd"), st.just("changes"), entries),
    st.tuples(st.just("publish"), st.just("routers"), rubbish),
)


async def do(redis: Any, acts: list[Any]) -> None:
    """As whoever may have written it; a key that is of another type stays as it is."""
    for verb, key, *arguments in acts:
        with contextlib.suppress(Exception):
            await getattr(redis, verb)(f"{PREFIX}:{key}", *arguments)


@contextlib.asynccontextmanager
async def redis_on(url: str) -> AsyncIterator[Any]:
    client = connect(url)
    await client.flushall()
    yield client
    await client.aclose()


async def read_all(redis: Any) -> tuple[Index, set[str], set[str], set[str]]:
    """All that a router reads: replicas, routers, prefixes."""
    index, unreadable = Index(redis, MODEL), Unreadable()
    records, _ = await index.all_records()
    for record in records:
        with contextlib.suppress(FencedError):
            snapshot = await index.blocks(record)
            assert record.id != "b" or set(snapshot.blocks) == set(BLOCKS)
    assert len(await index.counts(records)) == len(records)
    await index.leases_s()
    changes = [change for _, change in await index.follow(START, block_ms=1)]
    assert [change.seq for change in changes if change and change.replica_id == "b"][:2] == [0, 1]
    prefixes = Prefixes(redis, MODEL, unreadable=unreadable)
    await prefixes.revision()
    await prefixes.uses()
    await prefixes.count({"law": (1, 2)})
    known = {prefix.name for prefix in await prefixes.all()}
    await prefixes.declare(prefix("new"))
    return index, {record.id for record in records}, set(await index.routers()), known


def prefix(id_: str) -> Prefix:
    return Prefix(id_, 0, np.arange(9, dtype=np.uint32), {"prompt": "a"})


async def write_valid(redis: Any) -> None:
    """Two replicas, a router and a prefix: what acts do not touch is b, s and roman."""
    index, prefixes = Index(redis, MODEL), Prefixes(redis, MODEL)
    for replica_id in "ab":
        state = await index.register(
            replica_id, "1", description=DESCRIPTION, load=LOAD, lease_s=60
        )
        await index.change(state, added=BLOCKS, lease_s=60)
    for router_id in "rs":
        await index.announce_router(router_id, RouterDescription(ProcessLocation()), lease_s=60)
    for name in ("law", "roman"):
        await prefixes.declare(prefix(name))


@WAYS
@given(st.lists(acts, min_size=1, max_size=8))
@example([("hset", "replica:a", "facts", b'{"block_size": 4}')])
@example([("xadd", "changes", {"r": b"a", "i": b"1", "s": b"2", "a": b"123"})])
@example([("sadd", "blocks:b:1", b"abc"), ("sadd", "blocks:b:1", b"0123456789")])
@example([("hset", "prefixes", b"old@1", TERMS)])
@example([("set", "prefixes:revision", b"garbage"), ("set", "router:r", b"{")])
def test_any_bytes_in_any_key_leave_the_neighbours_readable(
    redis_url: str, acts: list[Any]
) -> None:
    async def read() -> None:
        async with redis_on(redis_url) as redis:
            await write_valid(redis)
            await do(redis, acts)
            _, ids, routers, prefixes = await read_all(redis)
            assert ids >= {"b"}
            assert routers >= {"s"}
            assert prefixes >= {"roman@1"}

    asyncio.run(read())


valid = messages.encode(
    RouterMessage(
        VERSION, "r", [Dispatch("1", "a", 0.1, 10, 20, Fingerprints(BLOCKS), Fingerprints(BLOCKS))]
    )
)


@st.composite
def torn(draw: st.DrawFn) -> bytes:
    """A valid message with some of its bytes replaced."""
    begin = draw(st.integers(0, len(valid)))
    return valid[:begin] + draw(st.binary(max_size=9)) + valid[begin + draw(st.integers(0, 9)) :]


def known_fleet(**differs: Any) -> Fleet:
    return Fleet(model=MODEL, revision="", block_size=4, rng=random.Random(0), **differs)


@given(st.binary(max_size=60) | torn())
@example(messages.encode([VERSION, "r", [["s", "1", "a", float("nan"), 1, 2, b"", b""]]]))
@example(messages.encode([VERSION, "r", [["s", "1", "a", 0.1, 1, 2, b"1234567", b""]]]))
@example(messages.encode([VERSION + 1, "r", [["?", 1]]]))
def test_any_message_is_taken_or_counted_and_leaves_no_load_behind(payload: bytes) -> None:
    fleet, index = known_fleet(), Index(connect("redis://127.0.0.1:1"), MODEL)
    subscriber = PeerSubscriber(fleet, own="own", clock=lambda: 0.0)
    subscriber.receive_packed(payload, index)
    subscriber.receive_packed(valid, index)
    assert index.unreadable.counts["message"] <= 1
    subscriber.forget_all()
    for load in fleet.loads.by_id().values():
        assert (load.waiting_s, load.is_busy) == (0.0, False)


def test_a_message_of_another_version_says_so() -> None:
    index = Index(connect("redis://127.0.0.1:1"), MODEL)
    newer = messages.encode([VERSION + 1, "r", [["?", 1]]])
    PeerSubscriber(known_fleet(), own="own").receive_packed(newer, index)
    assert index.unreadable.last["message"].reason == (
        f"its version is {VERSION + 1}; this process reads version {VERSION}"
    )


class World:
    """A replica and a router's tasks around one Redis, each of which must not end."""

    def __init__(self, redis: Any) -> None:
        self.index = Index(redis, MODEL)
        self.table = BlockTable()
        self.publisher = Publisher(
            Index(redis, MODEL),
            self.table,
            replica_id="a",
            description=DESCRIPTION,
            load=lambda: LOAD,
            lease_s=LEASE_S,
        )
        self.publisher.publish([BlockStored(range(20), list(map(Fingerprint, range(20))))])
        self.fleet = known_fleet(running=lambda: ["a"])
        self.feed = Feed(self.index, self.fleet)
        self.subscriber = PeerSubscriber(self.fleet, own="own")
        store = Prefixes(redis, MODEL)
        self.catalogue = Catalogue(store, self.fleet, block_size=4)
        composer: Any = None  # there are no tasks to compose
        self.tasks = [
            asyncio.create_task(work)
            for work in (
                self.publisher.run(),
                self.feed.run(),
                self.subscriber.run(self.index),
                self.catalogue.run((), composer),
            )
        ]

    def is_right(self) -> bool:
        held = set(self.table.held())
        return (
            [record.id for record in self.fleet.replicas.records] == ["a"]
            and self.fleet.mirror.replica_ids == {"a"}
            and held_by(self.fleet.mirror, "a") == held
            and not self.fleet.replicas.degraded
            and self.feed.state.is_reachable
        )

    async def settle(self) -> None:
        async with asyncio.timeout(HEALED_S):
            while not self.is_right():
                assert not any(task.done() for task in self.tasks)
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 0.05)
    monkeypatch.setattr("kvroute.router.index.feed.WAIT_MS", 10)
    monkeypatch.setattr("kvroute.router.index.feed.RETRY_S", 0.02)
    monkeypatch.setattr("kvroute.router.index.feed.LINGER_S", 0.2)
    monkeypatch.setattr("kvroute.replica.publisher.RETRY_S", 0.02)
    monkeypatch.setattr("kvroute.store.revision.POLL_S", 0.02)
    monkeypatch.setattr("kvroute.store.revision.RETRY_S", 0.02)


KEYS = ("replicas", "replica:a", "changes")
types = st.tuples(st.just("become"), st.sampled_from(KEYS))


async def pollute(redis: Any, acts: list[Any]) -> None:
    """`become`: a key, with or without a lease, is of a type that none of ours has there."""
    for act in acts:
        if act[0] == "become":
            await redis.set(f"{PREFIX}:{act[1]}", b"a string")
        else:
            await do(redis, [act])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(acts | types, min_size=1, max_size=8))
@example([("hset", "replica:a", "facts", b"garbage")])
@example([("become", "replica:a")])
@example([("become", "replicas"), ("become", "changes")])
@example([("publish", "routers", b"garbage"), ("set", "prefixes:revision", b"garbage")])
def test_no_task_ends_and_the_index_heals(redis_url: str, acts: list[Any]) -> None:
    async def play() -> None:
        async with redis_on(redis_url) as redis:
            world = World(redis)
            try:
                await world.settle()
                await pollute(redis, acts)
                await asyncio.sleep(0.1)
                await world.settle()
            finally:
                await world.close()

    asyncio.run(play())


async def described(redis: Any, id_: str, change: Callable[[dict[str, Any]], None]) -> None:
    """A replica in the index that says of itself what another version may say."""
    said = json.loads(msgspec.json.encode(DESCRIPTION))
    change(said)
    index = Index(redis, MODEL)
    await index.register(id_, "1", description=DESCRIPTION, load=LOAD, lease_s=60)
    await redis.hset(f"{PREFIX}:replica:{id_}", "facts", json.dumps(said))


def newer(said: dict[str, Any]) -> None:
    said["version"] = VERSION + 1
    said["facts"] = {"tokens": "other"}


def older(said: dict[str, Any]) -> None:
    del said["version"]


def richer(said: dict[str, Any]) -> None:
    said["more"] = said["facts"]["more"] = {"of": "a later one that older readers may skip"}


@contextlib.asynccontextmanager
async def following(redis: Any, running: list[str]) -> AsyncIterator[Fleet]:
    fleet = known_fleet(running=lambda: running, handshake=Handshake())
    task = asyncio.create_task(Feed(Index(redis, MODEL), fleet).run())
    try:
        await until(lambda: "ours" in {record.id for record in fleet.replicas.records})
        yield fleet
    finally:
        task.cancel()
        await asyncio.wait([task])


async def test_replicas_of_other_versions_are_degraded_and_all_others_are_not(
    redis_url: str,
) -> None:
    async with redis_on(redis_url) as redis:
        for id_, change in (("newer", newer), ("older", older), ("ours", richer)):
            await described(redis, id_, change)
        await described(redis, "stranger", newer)
        async with following(redis, ["newer", "older", "ours"]) as fleet:
            assert fleet.replicas.degraded == {
                "newer": "its record cannot be read: "
                "its version is 2; this process reads version 1",
                "older": "its record cannot be read: Object missing required field `version`",
            }
            placement = fleet.place(np.arange(9, dtype=np.uint32), ["newer", "ours"], 0.0)
            assert {each.replica_id for each in placement.ranking} == {"newer", "ours"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("block_size", 0), ("capacity_blocks", -1), ("max_model_len", 0)),
        *(("prefill_tokens_per_s", 0), ("attention_tokens", 1e300), ("pin_blocks", True)),
        *(("block_size", 2**70), ("prefix_caching", "yes"), ("engine", 7), ("max_num_seqs", None)),
    ],
)
async def test_a_record_with_a_value_that_cannot_be_is_not_read(
    redis_url: str, name: str, value: object
) -> None:
    async with redis_on(redis_url) as redis:
        await described(redis, "a", lambda said: said["facts"].update({name: value}))
        index = Index(redis, MODEL)
        assert (await index.all_records()).readable == []
        assert f"$.facts.{name}" in index.unreadable.last["replica"].reason


async def test_a_strangers_record_does_not_shrink_what_the_cluster_accepts(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        index = Index(redis, MODEL)
        for id_, max_model_len in (("ours", 4096), ("stranger", 100)):
            said = Description(facts(max_model_len=max_model_len))
            await index.register(id_, "1", description=said, load=LOAD, lease_s=60)
        async with following(redis, ["ours"]) as fleet:
            await until(lambda: len(fleet.replicas.records) == 2)
            assert fleet.replicas.max_model_len == FACTS.max_model_len


async def test_a_record_of_another_model_is_not_read(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        index, said = Index(redis, MODEL), Description(FACTS, model="other")
        await index.register("a", "1", description=said, load=LOAD, lease_s=60)
        assert await index.records() == []
        assert index.unreadable.last["replica"].reason == "its model is 'other'"


async def test_two_clusters_in_one_redis_do_not_mix(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        one, other = (Index(redis, MODEL, cluster=name) for name in ("one", "other"))
        state = await one.register("a", "1", description=DESCRIPTION, load=LOAD, lease_s=60)
        await one.change(state, added=BLOCKS, lease_s=60)
        await one.announce_router("r", RouterDescription(ProcessLocation()), lease_s=60)
        messages = other.router_messages(wait_s=0.2)
        heard = asyncio.ensure_future(anext(messages))
        await asyncio.sleep(0.05)
        await one.publish_to_routers(valid)
        mine, theirs = (Prefixes(redis, MODEL, cluster=name) for name in ("one", "other"))
        await mine.declare(prefix("law"))
        assert await heard is None
        assert await other.records() == []
        assert await other.routers() == {}
        assert list(await other.follow(START, block_ms=1)) == []
        assert await theirs.all() == []


def test_every_pair_of_cluster_and_model_has_keys_of_its_own() -> None:
    parts = ("a", "b", "a/b", "b/a", "{a}", "(a)", "a}", "%7Ba}", "a%2Fb", "")
    prefixes = {key_prefix(cluster, model) for cluster in parts for model in parts}
    assert len(prefixes) == len(parts) ** 2
    assert all(
        (prefix.count("{"), prefix.count("}"), prefix[-1]) == (1, 1, "}") for prefix in prefixes
    )


async def test_clusters_of_one_redis_hear_of_each_other(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        unreadable = Unreadable()
        clusters = Clusters(redis, unreadable)
        own = ClusterModel("one", MODEL, "10.0.0.1:6379", "kvroute")
        twin = ClusterModel("one", MODEL, "10.0.0.2:6379", "kvroute")
        other = ClusterModel("other", MODEL, "10.0.0.2:6379", "kvroute")
        for each in (own, twin, other, own):
            await clusters.announce(each)
        await redis.zadd(KEY, {b"garbage\xff": 2e9 * 2})
        assert await clusters.all() == [own, twin, other]
        assert [each.is_twin_of(own) for each in (own, twin, other)] == [False, True, False]
        assert unreadable.counts["cluster"] == 1
        await clusters.withdraw(twin)
        assert await clusters.all() == [own, other]


async def test_a_cluster_that_went_silent_is_forgotten(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        clusters, gone = Clusters(redis, Unreadable()), ClusterModel("gone", MODEL, "", "")
        await redis.zadd(KEY, {msgspec.json.encode(gone): 1.0})
        assert await clusters.all() == []
        await clusters.announce(ClusterModel("one", MODEL, "", ""))
        assert await redis.zcard(KEY) == 1
        assert 0 < await redis.ttl(KEY) <= 30


async def test_a_renewal_puts_right_what_a_record_says(redis_url: str) -> None:
    async with redis_on(redis_url) as redis:
        index = Index(redis, MODEL)
        state = await index.register("a", "1", description=DESCRIPTION, load=LOAD, lease_s=60)
        await index.renew(state, load=Load(running=1), lease_s=60)
        (record,) = await index.records()
        assert (record.facts, record.load) == (FACTS, Load(running=1))
        await redis.hset(f"{PREFIX}:replica:a", "facts", b"{}")
        with pytest.raises(FencedError):
            await index.renew(state, load=LOAD, lease_s=60)
