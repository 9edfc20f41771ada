"""The index on a real Redis: writers are heard, stale writers are not, mirrors follow."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
from redis.asyncio import Redis

from kvroute.blocks.fingerprint import Fingerprint, pack, unpack
from kvroute.contract.records import Load
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from kvroute.replica.publisher import Publisher
from kvroute.router.index.feed import Feed, Seen
from kvroute.router.placement.fleet import Fleet
from kvroute.store.index import BATCH_BLOCKS, FencedError, Index
from kvroute.store.index_values import START, BlockSet, Change, WriterState
from tests.support.mirrors import held_by
from tests.support.records import DESCRIPTION, FACTS, LOAD
from tests.support.waiting import until

LEASE_S = 5.0
BLOCKS = [Fingerprint(2**63 + i) for i in range(10)]


@pytest.fixture
def index(empty_redis: Redis) -> Index:
    return Index(empty_redis, "a model")


async def join(index: Index, replica_id: str, incarnation: str = "1") -> WriterState:
    return await index.register(
        replica_id, incarnation, description=DESCRIPTION, load=LOAD, lease_s=LEASE_S
    )


async def changes(index: Index) -> list[Change]:
    return [change for _, change in await index.follow(START, block_ms=1) if change is not None]


async def test_a_record_says_who_lives_and_how_busy_it_is(index: Index) -> None:
    writer_state = await join(index, "a")
    await index.renew(writer_state, load=Load(running=7), lease_s=LEASE_S)
    (record,) = await index.records()
    assert (record.id, record.incarnation, record.seq) == ("a", "1", 0)
    assert record.facts == FACTS
    assert record.load.running == 7


async def test_set_and_stream_change_together(index: Index) -> None:
    writer_state = await join(index, "a")
    writer_state = await index.change(writer_state, added=BLOCKS, lease_s=LEASE_S)
    writer_state = await index.change(writer_state, removed=BLOCKS[5:], lease_s=LEASE_S)
    assert writer_state == WriterState("a", "1", seq=2, blocks=5)
    (record,) = await index.records()
    snapshot = await index.blocks(record)
    assert (snapshot.seq, set(snapshot.blocks)) == (2, set(BLOCKS[:5]))
    assert snapshot.position == await index.position()
    assert await changes(index) == [
        Change("a", "1", 0, joined=True),
        Change("a", "1", 1, added=tuple(BLOCKS)),
        Change("a", "1", 2, removed=tuple(BLOCKS[5:])),
    ]


async def test_some_blocks_can_be_asked_for_without_the_whole_set(index: Index) -> None:
    writer_state = await join(index, "a")
    (empty,) = await index.records()
    assert await index.held(empty, BLOCKS[:3]) == 0
    await index.change(writer_state, added=BLOCKS[:5], lease_s=LEASE_S)
    (record,) = await index.records()
    assert await index.held(record, BLOCKS[3:8]) == 2


async def test_a_lease_says_how_long_it_still_runs(index: Index) -> None:
    await join(index, "a")
    left_s = await index.leases_s()
    assert left_s.keys() == {"a"}
    assert 0 < left_s["a"] <= LEASE_S


async def test_a_clear_forgets_what_came_before_and_keeps_what_comes_with_it(index: Index) -> None:
    writer_state = await join(index, "a")
    writer_state = await index.change(writer_state, added=BLOCKS[:5], lease_s=LEASE_S)
    await index.change(writer_state, cleared=True, added=BLOCKS[7:], lease_s=LEASE_S)
    (record,) = await index.records()
    assert set((await index.blocks(record)).blocks) == set(BLOCKS[7:])


async def test_a_replaced_writer_changes_nothing(index: Index) -> None:
    old = await join(index, "a", "old")
    await join(index, "a", "new")
    with pytest.raises(FencedError, match="old"):
        await index.change(old, added=BLOCKS, lease_s=LEASE_S)
    with pytest.raises(FencedError):
        await index.renew(old, load=LOAD, lease_s=LEASE_S)
    await index.leave("a", "old")
    (record,) = await index.records()
    assert await index.blocks(record) == BlockSet(0, await index.position(), b"")


async def test_a_writer_that_may_not_replace_waits_for_the_other_one_to_leave(index: Index) -> None:
    async def try_to_join() -> WriterState:
        return await index.register(
            "a", "old", replaces=False, description=DESCRIPTION, load=LOAD, lease_s=LEASE_S
        )

    await join(index, "a", "new")
    with pytest.raises(FencedError):
        await try_to_join()
    await index.leave("a", "new")
    assert await try_to_join() == WriterState("a", "old")


async def test_a_writer_notices_that_redis_lost_a_write(index: Index) -> None:
    writer_state = await join(index, "a")
    lost = await index.change(writer_state, added=BLOCKS, lease_s=LEASE_S)
    await join(index, "a")  # Redis as it was before the change
    with pytest.raises(FencedError):
        await index.renew(lost, load=LOAD, lease_s=LEASE_S)


async def test_a_writer_notices_that_its_set_was_evicted(index: Index) -> None:
    writer_state = await join(index, "a")
    writer_state = await index.change(writer_state, added=BLOCKS, lease_s=LEASE_S)
    await index._redis.delete(index._blocks_key("a", "1"))
    with pytest.raises(FencedError):
        await index.change(writer_state, removed=BLOCKS[:1], lease_s=LEASE_S)


async def test_a_lease_that_is_not_renewed_takes_everything_with_it(index: Index) -> None:
    writer_state = await index.register("a", "1", description=DESCRIPTION, load=LOAD, lease_s=2.0)
    writer_state = await index.change(writer_state, added=BLOCKS, lease_s=2.0)
    await asyncio.sleep(2.1)
    with pytest.raises(FencedError):
        await index.change(writer_state, added=BLOCKS, lease_s=LEASE_S)
    assert [key async for key in index._redis.scan_iter("*")] == []


async def test_what_replicas_share_lives_by_the_longest_lease(index: Index) -> None:
    await join(index, "a")
    await index.register("b", "1", description=DESCRIPTION, load=LOAD, lease_s=0.05)
    await asyncio.sleep(0.1)
    assert [record.id for record in await index.records()] == ["a"]


async def test_a_change_of_many_blocks_is_taken_whole(index: Index) -> None:
    many = [Fingerprint(i) for i in range(BATCH_BLOCKS)]
    await index.change(await join(index, "a"), added=many, lease_s=LEASE_S)
    (record,) = await index.records()
    assert set((await index.blocks(record)).blocks) == set(many)


async def test_changes_are_kept_for_a_while_only(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.store.index.STREAM_MS", 50)
    many = [Fingerprint(i) for i in range(BATCH_BLOCKS)]
    writer_state = await join(index, "a")
    for _ in range(5):
        writer_state = await index.change(writer_state, added=many, lease_s=LEASE_S)
    await asyncio.sleep(0.1)
    await index.change(writer_state, removed=many, lease_s=LEASE_S)
    assert await index._redis.xlen(index._changes) <= 2  # Redis trims a node at a time


async def test_models_do_not_see_each_other(index: Index) -> None:
    await join(index, "a")
    assert await Index(index._redis, "another {model}").records() == []


async def test_all_keys_of_a_model_share_one_hash_tag(index: Index) -> None:
    await index.change(await join(index, "a"), added=BLOCKS, lease_s=LEASE_S)
    keys = [key.decode() async for key in index._redis.scan_iter("*")]
    assert len(keys) == 4
    assert all(key.startswith("kvroute:{default/a model}:") for key in keys)


def test_the_wire_bytes_are_pinned() -> None:
    packed = pack([Fingerprint(1), Fingerprint(2**64 - 2)])
    assert packed == bytes.fromhex("0100000000000000feffffffffffffff")
    assert unpack(packed) == (1, 2**64 - 2)


class Side:
    """A publisher and a feed on one index, each in its own task."""

    def __init__(self, index: Index, lease_s: float = LEASE_S) -> None:
        self.table = BlockTable()
        self.publisher = Publisher(
            index,
            self.table,
            replica_id="a",
            description=DESCRIPTION,
            load=lambda: LOAD,
            lease_s=lease_s,
        )
        self.fleet = Fleet(model="a model", revision="", block_size=4, rng=random.Random(0))
        self.feed = Feed(index, self.fleet)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Side"]:
        tasks = [asyncio.create_task(self.publisher.run()), asyncio.create_task(self.feed.run())]
        try:
            await until(lambda: "a" in self.fleet.mirror.replica_ids)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def is_equal(self) -> bool:
        return held_by(self.fleet.mirror, "a") == set(self.table.held())


def stored(first: int, blocks: int) -> BlockStored:
    hashes = range(first, first + blocks)
    return BlockStored(hashes, [Fingerprint(7 * number) for number in hashes])


async def test_what_the_engine_stores_and_evicts_reaches_the_mirror(index: Index) -> None:
    async with Side(index).running() as side:
        side.publisher.publish([stored(0, 50), stored(50, 10)])
        await until(lambda: len(held_by(side.fleet.mirror, "a")) == 60)
        side.publisher.publish([BlockRemoved([59]), BlockRemoved([58])])
        await until(lambda: len(held_by(side.fleet.mirror, "a")) == 58)
        assert side.is_equal()


async def test_a_clear_reaches_the_mirror(index: Index) -> None:
    async with Side(index).running() as side:
        side.publisher.publish([stored(0, 50)])
        await until(lambda: len(held_by(side.fleet.mirror, "a")) == 50)
        side.publisher.publish([AllBlocksCleared(), stored(70, 2)])
        await until(lambda: len(held_by(side.fleet.mirror, "a")) == 2)


async def test_a_router_that_starts_late_finds_everything(index: Index) -> None:
    async with Side(index).running() as side:
        side.publisher.publish([stored(0, 50)])
        await until(side.is_equal)
        late = Fleet(model="a model", revision="", block_size=4, rng=random.Random(0))
        task = asyncio.create_task(Feed(index, late).run())
        await until(lambda: held_by(late.mirror, "a") == set(side.table.held()))
        task.cancel()


async def test_requests_go_on_while_a_router_takes_many_blocks_in(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.router.index.feed.STEP_S", 0.0)
    many = [Fingerprint(i) for i in range(BATCH_BLOCKS)]
    await index.change(await join(index, "a"), added=many, lease_s=LEASE_S)
    fleet = Fleet(model="a model", revision="", block_size=4, rng=random.Random(0))
    task = asyncio.create_task(Feed(index, fleet).run())
    seen = set[int]()
    while len(fleet.mirror) < len(many):
        await asyncio.sleep(0)
        seen.add(len(fleet.mirror))
    assert len(seen) > 100
    task.cancel()


async def test_after_redis_forgot_everything_the_publisher_announces_all_again(
    index: Index,
) -> None:
    async with Side(index).running() as side:
        side.publisher.publish([stored(0, 50)])
        await until(lambda: side.is_equal() and len(side.table) == 50)
        await index._redis.flushall()
        side.publisher.publish([stored(50, 5)])
        await until(lambda: len(held_by(side.fleet.mirror, "a")) == 55)
        (record,) = await index.records()
        assert set((await index.blocks(record)).blocks) == set(side.table.held())


async def test_changes_that_the_stream_lost_are_noticed_and_loaded(index: Index) -> None:
    async with Side(index).running() as side:
        side.publisher.publish([stored(0, 50)])
        await until(lambda: side.is_equal() and len(side.table) == 50)
        (record,) = await index.records()
        await until(lambda: side.feed._seen["a"].seq == record.seq)  # it has nothing in hand
        side.feed._seen["a"] = Seen("1", 0, START)  # as if it had followed another incarnation
        side.fleet.mirror.join("a")
        await until(side.is_equal)


async def test_a_leaving_stands_in_the_stream(index: Index) -> None:
    await index.change(await join(index, "a"), added=BLOCKS, lease_s=LEASE_S)
    await index.leave("a", "1")
    assert (await changes(index))[-1] == Change("a", "1", 2, left=True)


async def test_the_leaving_of_a_replaced_writer_is_not_told(index: Index) -> None:
    await join(index, "a", "old")
    await join(index, "a", "new")
    await index.leave("a", "old")
    assert not any(change.left for change in await changes(index))


async def test_a_leaving_begins_no_stream_that_nobody_would_end(index: Index) -> None:
    await join(index, "a")
    await index._redis.delete(index._changes)
    await index.leave("a", "1")
    assert await index._redis.dbsize() == 0


async def test_a_replica_that_leaves_is_forgotten_without_a_poll(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 3600.0)
    await index.change(await join(index, "a"), added=BLOCKS, lease_s=LEASE_S)
    async with following(index) as fleet:
        await index.leave("a", "1")
        await until(lambda: not fleet.mirror.replica_ids and not fleet.replicas.records)


async def test_a_replica_that_vanishes_is_known_for_a_while(
    index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    await index.change(await join(index, "a"), added=BLOCKS, lease_s=LEASE_S)
    async with following(index) as fleet:
        monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 0.01)
        monkeypatch.setattr("kvroute.router.index.feed.LINGER_S", 60.0)
        await index._redis.flushall()
        await asyncio.sleep(0.5)
        assert held_by(fleet.mirror, "a") == set(BLOCKS)
        assert [record.id for record in fleet.replicas.records] == ["a"]
        monkeypatch.setattr("kvroute.router.index.feed.LINGER_S", 0.5)
        await until(lambda: not fleet.mirror.replica_ids and not fleet.replicas.records)


@pytest.mark.parametrize(
    ("refusing", "taking"),
    [
        ("REPLICAOF 127.0.0.1 1", "REPLICAOF NO ONE"),
        ("CONFIG SET maxmemory 1", "CONFIG SET maxmemory 0"),
        ("CONFIG SET min-replicas-to-write 1", "CONFIG SET min-replicas-to-write 0"),
    ],
    ids=["a replica", "full", "without replicas"],
)
async def test_a_redis_that_refuses_writes_costs_no_replica_its_place(
    index: Index, monkeypatch: pytest.MonkeyPatch, refusing: str, taking: str
) -> None:
    monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 0.05)
    monkeypatch.setattr("kvroute.router.index.feed.RETRY_S", 0.05)
    monkeypatch.setattr("kvroute.router.index.feed.LINGER_S", 0.5)
    async with Side(index, lease_s=0.6).running() as side:
        side.publisher.publish([stored(0, 50)])
        await until(lambda: side.is_equal() and len(side.table) == 50)
        await index._redis.execute_command(*refusing.split())
        try:
            await until(lambda: not side.feed.state.is_reachable)
            await asyncio.sleep(1.5)  # longer than the lease and than what a vanished one is kept
            assert len(held_by(side.fleet.mirror, "a")) == 50
            assert [record.id for record in side.fleet.replicas.records] == ["a"]
        finally:
            await index._redis.execute_command(*taking.split())
        side.publisher.publish([stored(50, 5)])
        await until(lambda: side.feed.state.is_reachable and side.is_equal())
        assert len(side.table) == 55


async def test_an_outage_is_logged_once_when_it_begins_and_once_when_it_is_over(
    index: Index, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise ConnectionRefusedError("nobody is there")

    monkeypatch.setattr("kvroute.router.index.feed.RETRY_S", 0.01)
    feed = Feed(index, Fleet(model="a model", revision="", block_size=4, rng=random.Random(0)))
    with monkeypatch.context() as away:
        away.setattr(index, "position", refuse)
        task = asyncio.create_task(feed.run())
        await until(lambda: not feed.state.is_reachable and feed.state.age_s > 0.2)
    await until(lambda: feed.state.is_reachable and feed.state.age_s < 0.2)
    task.cancel()
    said = [record.message for record in caplog.records]
    assert [message[:13] for message in said] == ["Redis is away", "Redis is back"]


async def test_a_router_that_starts_waits_for_the_index_but_not_long(
    index: Index,
) -> None:
    await index.change(await join(index, "a"), added=BLOCKS, lease_s=LEASE_S)
    fleet = Fleet(model="a model", revision="", block_size=4, rng=random.Random(0))
    feed = Feed(index, fleet)
    await feed.wait_until_loaded(timeout_s=0.01)  # it does not even run
    task = asyncio.create_task(feed.run())
    await feed.wait_until_loaded(timeout_s=60)
    assert held_by(fleet.mirror, "a") == set(BLOCKS)
    task.cancel()


@contextlib.asynccontextmanager
async def following(index: Index) -> AsyncIterator[Fleet]:
    """A router's fleet that has BLOCKS of replica a."""
    fleet = Fleet(model="a model", revision="", block_size=4, rng=random.Random(0))
    task = asyncio.create_task(Feed(index, fleet).run())
    await until(lambda: held_by(fleet.mirror, "a") == set(BLOCKS))
    yield fleet
    task.cancel()


async def test_what_waits_for_redis_is_bounded_by_what_the_engine_holds(index: Index) -> None:
    side = Side(index)
    side.publisher._is_registered = True
    for first in range(0, 3 * BATCH_BLOCKS, 100):
        side.publisher.publish([stored(first, 100), BlockRemoved(list(range(first, first + 99)))])
        changes = side.publisher._changes
        assert len(changes.added) <= len(side.table)
        assert len(changes.removed) <= BATCH_BLOCKS
    assert changes.cleared


async def test_what_redis_does_not_hear_of_does_not_pile_up(index: Index) -> None:
    side = Side(index)
    side.publisher.publish([stored(0, 50), BlockRemoved([49])])
    assert not side.publisher._changes


async def test_a_cancelled_task_ends_wherever_it_was(index: Index) -> None:
    for steps in range(150):
        side = Side(index)
        tasks = [asyncio.create_task(side.publisher.run()), asyncio.create_task(side.feed.run())]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        _, going_on = await asyncio.wait(tasks, timeout=30)
        assert not going_on, f"after {steps} steps"
