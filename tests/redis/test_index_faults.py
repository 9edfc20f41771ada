"""Whatever happens to writers, Redis and readers: in the end mirror, Redis and engines agree."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.local.ports import free_port
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    EventsLost,
)
from kvroute.replica.publisher import Publisher
from kvroute.router.index.feed import Feed
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import FencedError, Index
from kvroute.store.index_values import Change, Position, WriterState
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix
from tests.support.mirrors import held_by
from tests.support.records import DESCRIPTION, LOAD
from tests.support.redis_server import redis_server
from tests.support.waiting import until

MODEL = "a model"
KEYS = key_prefix(DEFAULT_CLUSTER, MODEL)
LEASE_S = 0.3
HEALED_S = 60.0  # within which all must be right; it takes a lease and some polls


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 0.05)
    monkeypatch.setattr("kvroute.router.index.feed.WAIT_MS", 10)
    monkeypatch.setattr("kvroute.router.index.feed.RETRY_S", 0.02)
    monkeypatch.setattr("kvroute.router.index.feed.LINGER_S", 0.2)
    monkeypatch.setattr("kvroute.replica.publisher.RETRY_S", 0.02)


class Wire(Index):
    """An index whose user can be stopped in the middle of a call, or lose one write."""

    def __init__(self, client: Any) -> None:
        super().__init__(client, MODEL)
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.has_stopped = False  # a reader
        self.loses = ""  # the next write: "request" or "answer"

    async def _write(
        self, script: Any, writer_state: WriterState, lease_s: float, arguments: list[Any]
    ) -> int:
        await self.goes_on.wait()
        loses, self.loses = self.loses, ""
        if loses == "request":
            raise TimeoutError
        answer = await super()._write(script, writer_state, lease_s, arguments)
        if loses == "answer":
            raise TimeoutError
        return answer

    async def follow(
        self, position: Position, *, block_ms: int
    ) -> Iterator[tuple[Position, Change | None]]:
        changes = await super().follow(position, block_ms=block_ms)
        self.has_stopped = not self.goes_on.is_set()
        await self.goes_on.wait()
        self.has_stopped = False
        return changes


class Engine:
    """Holds the first blocks of an endless prompt, and has a publisher that tells so."""

    def __init__(self, client: Any, replica_id: str, lease_s: float) -> None:
        self.wire = Wire(client)
        self.table = BlockTable()
        self.prompt = 0
        self.blocks = 0  # of that prompt
        self.publisher = Publisher(
            self.wire,
            self.table,
            replica_id=replica_id,
            description=DESCRIPTION,
            load=lambda: LOAD,
            lease_s=lease_s,
        )
        self.task = asyncio.create_task(self.publisher.run())

    def store(self) -> None:
        begin, end = self.blocks, self.blocks + 3
        names = [self._name(block) for block in range(begin, end)]
        self.publisher.publish([BlockStored(names, list(map(Fingerprint, names)))])
        self.blocks = end

    def evict(self) -> None:
        if self.blocks:
            self.blocks -= 1
            self.publisher.publish([BlockRemoved([self._name(self.blocks)])])

    def clear(self) -> None:
        """The next blocks are of another prompt."""
        self.prompt += 1
        self.blocks = 0
        self.publisher.publish([AllBlocksCleared()])

    def lose_events(self) -> None:
        """Of evictions; the engine then tells what it holds."""
        self.blocks = max(0, self.blocks - 2)
        held: dict[BlockHash, int] = {self._name(block): 1 for block in range(self.blocks)}
        self.publisher.publish([EventsLost(), BlocksHeld([held])])

    def _name(self, block: int) -> int:
        return self.prompt << 32 | block

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait([self.task])


class World:
    """A Redis, a router's mirror, and replicas. What may happen to one is a verb that takes its id;
    it happens in a moment, and what follows from it takes its time."""

    def __init__(self, client: Any, lease_s: float) -> None:
        self.redis = client
        self.lease_s = lease_s
        self.engines: dict[str, Engine] = {}
        self.replaced: list[Engine] = []  # and still running
        self.saved: list[tuple[bytes, int, bytes]] = []  # key, when it ends, content
        self.index = Index(client, MODEL)
        self.wire = Wire(client)
        self.fleet = Fleet(model=MODEL, revision="", block_size=4, rng=random.Random(0))
        self.feed = Feed(self.wire, self.fleet)
        self.task = asyncio.create_task(self.feed.run())

    def engine(self, replica_id: str) -> Engine:
        """The one that lives; a new one where none does."""
        if replica_id not in self.engines:
            self.engines[replica_id] = Engine(self.redis, replica_id, self.lease_s)
        return self.engines[replica_id]

    async def wait(self, _: str) -> None:
        await asyncio.sleep(0.02)

    async def store(self, replica_id: str) -> None:
        self.engine(replica_id).store()

    async def evict(self, replica_id: str) -> None:
        self.engine(replica_id).evict()

    async def clear(self, replica_id: str) -> None:
        self.engine(replica_id).clear()

    async def lose_events(self, replica_id: str) -> None:
        self.engine(replica_id).lose_events()

    async def stop(self, replica_id: str) -> None:
        self.engine(replica_id).wire.goes_on.clear()

    async def go_on(self, replica_id: str) -> None:
        self.engine(replica_id).wire.goes_on.set()

    async def lose_a_request(self, replica_id: str) -> None:
        self.engine(replica_id).wire.loses = "request"

    async def lose_an_answer(self, replica_id: str) -> None:
        self.engine(replica_id).wire.loses = "answer"

    async def replace(self, replica_id: str) -> None:
        self.replaced.append(self.engine(replica_id))
        del self.engines[replica_id]
        self.engine(replica_id)

    async def die(self, replica_id: str) -> None:
        await self.engine(replica_id).end()
        del self.engines[replica_id]

    async def leave(self, replica_id: str) -> None:
        publisher = self.engine(replica_id).publisher
        await self.die(replica_id)
        await publisher.leave()

    async def end_lease(self, replica_id: str) -> None:
        await self._delete(f"*:{replica_id}*")

    async def evict_set(self, replica_id: str) -> None:
        await self._delete(f"blocks:{replica_id}:*")

    async def delete_stream(self, _: str) -> None:
        await self._delete("changes")

    async def trim(self, _: str) -> None:
        await self.redis.xtrim(f"{KEYS}:changes", maxlen=0, approximate=False)

    async def stop_router(self, _: str) -> None:
        self.wire.goes_on.clear()
        await until(lambda: self.wire.has_stopped)

    async def resume_router(self, _: str) -> None:
        self.wire.goes_on.set()

    async def save(self, _: str) -> None:
        now_ms = await self._now_ms()
        self.saved = [
            (key, now_ms + await self.redis.pttl(key), await self.redis.dump(key))
            async for key in self.redis.scan_iter("*")
        ]

    async def restore(self, _: str) -> None:
        """Redis is what it was at the last `save`, or empty; leases that ended meanwhile ended."""
        now_ms = await self._now_ms()
        async with self.redis.pipeline(transaction=True) as at_once:
            at_once.flushall()
            for key, ends_ms, content in self.saved:
                if ends_ms > now_ms:
                    at_once.restore(key, ends_ms, content, absttl=True)
            await at_once.execute()

    async def settle(self) -> None:
        """All faults end; waits until everything is right, and still is a while later."""
        for engine in self.replaced:
            await engine.end()
        for wire in (self.wire, *(engine.wire for engine in self.engines.values())):
            wire.goes_on.set()
        async with asyncio.timeout(HEALED_S):
            while not (await self._is_right() and await self._is_right(after_s=LEASE_S)):
                await asyncio.sleep(0.02)

    async def end(self) -> None:
        """The replicas are killed; waits until nothing is left of them, here or in Redis."""
        for engine in (*self.engines.values(), *self.replaced):
            await engine.end()
        async with asyncio.timeout(HEALED_S):
            while self._remains() or await self.redis.dbsize():
                await asyncio.sleep(0.02)

    async def close(self) -> None:
        for engine in (*self.engines.values(), *self.replaced):
            await engine.end()
        self.task.cancel()
        await asyncio.wait([self.task])
        await self.redis.aclose()

    async def _is_right(self, after_s: float = 0.0) -> bool:
        await asyncio.sleep(after_s)
        records = {record.id: record for record in await self.index.records()}
        if not records.keys() == self.engines.keys() == self.fleet.mirror.replica_ids:
            return False
        for replica_id, engine in self.engines.items():
            assert len(engine.table) == engine.blocks
            held = set(engine.table.held())
            try:
                snapshot = await self.index.blocks(records[replica_id])
            except FencedError:
                return False
            if not held == set(snapshot.blocks) == held_by(self.fleet.mirror, replica_id):
                return False
        return True

    def _remains(self) -> bool:
        feed, mirror = self.feed, self.fleet.mirror
        known = (len(mirror), len(mirror._expected), mirror.replica_ids, mirror._ids)
        follows = (feed._seen, feed._polled, feed._records, feed._vanished_s)
        return any((*known, mirror._live, mirror._dirty, *follows))

    async def _delete(self, pattern: str) -> None:
        keys = [key async for key in self.redis.scan_iter(f"{KEYS}:{pattern}")]
        if keys:
            await self.redis.delete(*keys)

    async def _now_ms(self) -> int:
        seconds, microseconds = await self.redis.time()
        return int(seconds * 1000 + microseconds // 1000)


@contextlib.asynccontextmanager
async def world_on(url: str, lease_s: float = LEASE_S) -> AsyncIterator[World]:
    client = connect(url)
    await client.flushall()
    world = World(client, lease_s)
    try:
        yield world
    finally:
        await world.close()


async def play(world: World, *steps: str) -> None:
    """Each step is a verb of World, and the id of a replica where it takes one."""
    for step in steps:
        verb, _, replica_id = step.partition(" ")
        await getattr(world, verb)(replica_id)


async def play_to_the_end(url: str, *steps: str) -> None:
    async with world_on(url) as world:
        await play(world, *steps)
        await world.settle()
        await world.end()


WORK = ("store", "store", "evict", "clear")
FAULTS = (
    *("stop", "go_on", "lose_a_request", "lose_an_answer", "replace", "die", "leave"),
    *("lose_events", "end_lease", "evict_set", "delete_stream", "trim"),
    *("stop_router", "resume_router", "save", "restore"),
)
verbs = st.one_of(st.sampled_from(WORK), st.sampled_from(FAULTS), st.just("wait"))
steps = st.tuples(verbs, st.sampled_from("ab")).map(" ".join)


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(st.lists(steps, min_size=5, max_size=40))
def test_after_any_row_of_faults_mirror_redis_and_engines_agree(
    redis_url: str, steps: list[str]
) -> None:
    asyncio.run(play_to_the_end(redis_url, *steps))


@pytest.mark.parametrize(
    "faults",
    [
        "clear a",
        "leave a",
        "die a",
        "stop a, end_lease a, store a, go_on a",
        "stop a, end_lease a, store a, evict a, wait, go_on a, wait, clear a",
        "lose_events a",
        "lose_a_request a, store a",
        "lose_an_answer a, store a",
        "replace a, store a, wait, wait, store a",
        "stop a, replace a, store a, wait, go_on a",
        "evict_set a",
        "restore",
        "save, store a, evict b, wait, wait, restore",
        "save, end_lease a, store a, wait, wait, wait, restore",
        "save, clear a, store a, store a, end_lease a, wait, wait, wait, wait, restore",
        "stop_router, store a, clear b, wait, wait, trim, resume_router",
        "stop_router, store a, wait, wait, delete_stream, resume_router, store a",
    ],
)
async def test_what_went_wrong_heals(redis_url: str, faults: str) -> None:
    async with world_on(redis_url) as world:
        await play(world, "store a", "store a", "store b")
        await world.settle()
        await play(world, *faults.split(", "))
        await world.settle()


async def test_a_router_that_missed_a_replicas_last_change_loads_the_replica(
    redis_url: str,
) -> None:
    async with world_on(redis_url, lease_s=60) as world:  # no renewal comes to its help
        await play(world, "store a", "store b")
        await world.settle()
        await play(world, "stop_router", "store a", *["wait"] * 5, "trim", "store b")
        await play(world, *["wait"] * 5, "resume_router")
        await world.settle()


async def test_the_newer_one_of_two_writers_with_one_id_stays(redis_url: str) -> None:
    async with world_on(redis_url, lease_s=10) as world:  # which does not end meanwhile
        await play(world, "store a")
        await until(lambda: world.engines["a"].publisher._is_registered)
        await play(world, "replace a", "store a")
        (old,), new = world.replaced, world.engines["a"]
        await until(lambda: new.publisher._is_registered)
        old.publisher.renew_soon()
        await until(lambda: not old.publisher._is_registered)
        await asyncio.sleep(LEASE_S)
        assert new.publisher._is_registered
        assert not old.publisher._is_registered
        await play(world, "leave a")
        await until(lambda: old.publisher._is_registered)


async def test_a_router_ahead_of_the_stream_goes_back_to_its_end(redis_url: str) -> None:
    async with world_on(redis_url) as world:
        await play(world, "store a")
        await world.settle()
        world.feed.position = Position(2**63, 0)  # as after a fail-over to a clock that is behind
        await until(lambda: world.feed.position < Position(2**63, 0))
        await play(world, "store a")
        await world.settle()


async def test_redis_killed_and_started_again_from_an_old_snapshot(tmp_path: Path) -> None:
    port = free_port()
    with redis_server(port, tmp_path) as url:
        world = World(connect(url), lease_s=30)
        await play(world, "store a", "store b")
        await world.settle()
        await world.redis.save()
        await play(world, "store a", "evict b", "store c")
        await world.settle()
        await play(world, "stop a", "stop b", "stop c")
    with redis_server(port, tmp_path):
        engines = world.engines
        await world.redis.connection_pool.disconnect()
        restored = {record.id: record.seq for record in await world.index.records()}
        assert restored.keys() == {"a", "b"}
        assert all(seq < engines[id_].publisher._writer_state.seq for id_, seq in restored.items())
        for engine in engines.values():
            engine.publisher.renew_soon()
        await world.settle()
        await world.close()
