"""Replicas cache the named prefixes assigned to them, with a real Redis and simulated engines."""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from msgspec.msgpack import encode
from msgspec.structs import replace
from redis.asyncio import Redis

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import EngineAwayError, Generate, GenerateRequest, NotBegunError
from kvroute.contract.records import Description, Load, TierFacts
from kvroute.features.prefixes.named_prefix import Prefix, assigned
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import Warm, warm_at
from kvroute.features.prefixes.warmer import Warmer
from kvroute.replica.block_table import BlockTable
from kvroute.replica.publisher import Publisher
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.store.index import Index
from tests.support.chunks import collected
from tests.support.waiting import until

SIZE = 32  # number of tokens in a block
INSTANT = SimulatedConfig(
    model="m",
    capacity_blocks=200,
    max_model_len=2048,
    prefill_tokens_per_s=0.0,
    decode_step_s=0.0,
    decode_per_seq_s=0.0,
)
FLOOD = itertools.count(1_000_000, 1600)  # first token ids of prompts with 50 blocks
PINNED_BLOCKS = 60  # number of the 200 blocks that pins may take


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.warmer.POLL_S", 0.02)


@pytest.fixture
def prefixes(empty_redis: Redis) -> Prefixes:
    return Prefixes(empty_redis, "m")


class Replica:
    """A replica without Ray Serve."""

    def __init__(self, redis: Any, id_: str = "a", config: SimulatedConfig = INSTANT) -> None:
        self.id = id_
        self.engine = SimulatedEngine(config)
        index = Index(redis, "m")
        self.publisher = Publisher(
            index,
            BlockTable(),
            replica_id=id_,
            description=Description(self.engine.facts),
            load=self._load,
            lease_s=60.0,  # so long that no renewal happens during a test
        )
        self.warmer = Warmer(
            self.engine,
            Prefixes(redis, "m"),
            index,
            replica_id=id_,
            on_change=self.publisher.renew_soon,
        )

    def _load(self) -> Load:
        features = {"prefixes": encode(self.warmer.cached())}
        return replace(self.engine.load(), features=features)

    @contextlib.asynccontextmanager
    async def running(self, *declared: str) -> AsyncIterator["Replica"]:
        tasks = [asyncio.create_task(self.publisher.run())]
        try:
            await self.warmer.start(declared)
            tasks.append(asyncio.create_task(self.warmer.run()))
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.publisher.leave()
            await self.engine.close()

    async def cached_blocks(self, prefix: Prefix, scope: Scope | None = None) -> int:
        return await self.ask([*prefix.token_ids.tolist(), 1], scope=scope) // SIZE

    async def ask(
        self, token_ids: list[int], max_tokens: int = 1, *, scope: Scope | None = None
    ) -> int:
        """Run a request; return the number of prompt tokens that came from the cache."""
        request = GenerateRequest("r", np.array(token_ids, np.uint32), max_tokens=max_tokens)
        if scope:
            shared = scope.shared_tokens
            request = replace(request, namespace=scope.namespace, shared_tokens=shared)
        chunks = await collected(self.engine.generate, request)
        return chunks[0].cached_tokens


async def declare(prefixes: Prefixes, id_: str, blocks: int = 10, **changes: Any) -> Prefix:
    first = sum(id_.encode()) * 10_000
    token_ids = np.arange(first, first + blocks * SIZE + 5, dtype=np.uint32)
    return await prefixes.declare(Prefix(id_, 0, token_ids, {"prompt": id_}, **changes))


async def until_record_has(replica: Replica, pins: dict[str, Warm]) -> None:
    """Wait until the replica's record in Redis has these pins."""
    index = replica.warmer._index
    async with asyncio.timeout(60):
        while (record := await index.record(replica.id)) is None or warm_at(record) != pins:
            await asyncio.sleep(0.01)


async def until_kept(replica: Replica, *names: str) -> None:
    await until(lambda: set(replica.warmer.cached()) == set(names))


async def test_prefixes_declared_before_the_start_are_cached_after_it(prefixes: Prefixes) -> None:
    prefix = await declare(prefixes, "x")
    async with Replica(prefixes._redis).running("x") as replica:
        assert replica.engine.pins == {"x@1": 10}
        assert await replica.cached_blocks(prefix) == 10


async def test_a_start_waits_for_pinned_prefixes_only(prefixes: Prefixes) -> None:
    await declare(prefixes, "x")
    await declare(prefixes, "y", is_pinned=False)
    async with Replica(prefixes._redis).running() as replica:
        assert replica.warmer.cached() == {"x@1": Warm(10, is_pinned=True)}
        await until_kept(replica, "x@1", "y@1")


async def test_a_start_computes_pinned_prefixes_for_a_limited_time(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.warmer.MAX_START_S", 0.0)
    await declare(prefixes, "x")
    async with Replica(prefixes._redis).running() as replica:
        assert replica.warmer.cached() == {}
        await until_kept(replica, "x@1")


async def test_a_start_waits_a_limited_time_for_the_prefixes_in_its_settings(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = Replica(prefixes._redis)
    start = asyncio.create_task(replica.warmer.start(["x"]))
    await asyncio.sleep(0.05)
    assert not start.done()
    await declare(prefixes, "x")
    await start
    assert replica.warmer.cached() == {"x@1": Warm(10, is_pinned=True)}
    monkeypatch.setattr("kvroute.features.prefixes.warmer.MAX_DECLARATION_WAIT_S", 0.1)
    await replica.warmer.start(["x", "never"])
    await replica.engine.close()


async def test_a_prefix_declared_later_is_computed_reported_and_released_when_deleted(
    prefixes: Prefixes,
) -> None:
    async with Replica(prefixes._redis).running() as replica:
        prefix = await declare(prefixes, "x")
        await until_record_has(replica, {"x@1": Warm(10, is_pinned=True)})
        assert await replica.cached_blocks(prefix) == 10
        await prefixes.drop("x")
        await until_record_has(replica, {})
        assert not replica.engine.pins


def with_host(**changes: Any) -> SimulatedConfig:
    """Return the configuration of an engine with a host tier of 400 blocks; pins may take 120."""
    host = TierFacts(400, 1000, 1e9, pin_blocks=120)
    return dataclasses.replace(INSTANT, prefill_tokens_per_s=100_000.0, host=host, **changes)


async def test_a_prefix_pinned_in_host_memory_is_reloaded_on_request(
    prefixes: Prefixes,
) -> None:
    prefix = await declare(prefixes, "x", is_in_host=True)
    async with Replica(prefixes._redis, config=with_host()).running("x") as replica:
        await until_record_has(replica, {"x@1": Warm(10, is_pinned=True, is_in_host=True)})
        assert (replica.engine.pins, replica.engine.host_pins) == ({}, {"x@1": 10})
        table = replica.engine._pool.table(prefix.token_ids, Scope())
        while any(hash_ in replica.engine._pool.cache for hash_ in table.hashes):
            await replica.ask([*range(next(FLOOD), next(FLOOD))])
        assert await replica.cached_blocks(prefix) == 10
        assert replica.engine.host_pins == {"x@1": 10}
        await prefixes.drop("x")
        await until_record_has(replica, {})
        assert replica.engine.host_pins == {}


async def test_without_a_host_tier_a_host_pin_is_not_pinned(prefixes: Prefixes) -> None:
    await declare(prefixes, "x", is_in_host=True)
    async with Replica(prefixes._redis).running() as replica:
        await until_record_has(replica, {"x@1": Warm(10, is_pinned=False)})


async def test_an_expired_prefix_is_released(prefixes: Prefixes) -> None:
    async with Replica(prefixes._redis).running() as replica:
        await declare(prefixes, "x", expires_at_s=time.time() + 4.0)
        await until_kept(replica, "x@1")
        await until(lambda: not replica.engine.pins)


async def test_an_old_version_stays_until_it_is_retired(prefixes: Prefixes) -> None:
    async with Replica(prefixes._redis).running() as replica:
        await declare(prefixes, "x")
        await until_kept(replica, "x@1")
        await declare(prefixes, "x", blocks=12)
        await until_kept(replica, "x@1", "x@2")
        assert replica.engine.pins == {"x@1": 10, "x@2": 12}
        await prefixes.retire("x", 1)
        await until(lambda: replica.engine.pins == {"x@2": 12})


async def test_a_prefix_above_the_limit_of_pins_is_cached_unpinned_until_it_fits(
    prefixes: Prefixes,
) -> None:
    async with Replica(prefixes._redis).running() as replica:
        assert replica.engine.facts.pin_blocks == PINNED_BLOCKS
        await declare(prefixes, "x", blocks=40)
        prefix = await declare(prefixes, "y", blocks=21)
        await until_kept(replica, "x@1", "y@1")
        assert replica.warmer.cached()["y@1"] == Warm(21, is_pinned=False)
        assert await replica.cached_blocks(prefix) == 21
        await prefixes.drop("x")
        await until(lambda: replica.engine.pins == {"y@1": 21})


async def test_an_unpinned_prefix_is_cached_and_can_be_evicted(prefixes: Prefixes) -> None:
    prefix = await declare(prefixes, "x", is_pinned=False)
    async with Replica(prefixes._redis).running() as replica:
        await until_kept(replica, "x@1")
        assert replica.warmer.cached() == {"x@1": Warm(10, is_pinned=False)}
        assert await replica.cached_blocks(prefix) == 10
        for n in range(8):
            await replica.ask(list(range(n * 2000, (n + 1) * 2000)))
        assert await replica.cached_blocks(prefix) == 0


async def test_a_prefix_shorter_than_a_block_is_cached_with_no_blocks(prefixes: Prefixes) -> None:
    await declare(prefixes, "x", blocks=0)
    async with Replica(prefixes._redis).running() as replica:
        assert replica.warmer.cached() == {"x@1": Warm(0, is_pinned=True)}


async def test_a_prefix_that_the_engine_rejects_does_not_stop_the_replica(
    prefixes: Prefixes, caplog: pytest.LogCaptureFixture
) -> None:
    await declare(prefixes, "long", blocks=64, is_pinned=False)
    await declare(prefixes, "x")

    def refusals() -> int:
        return len([line for line in caplog.messages if "long@1" in line])

    async with Replica(prefixes._redis).running() as replica:
        await until(refusals)
        await asyncio.sleep(0.1)
        assert set(replica.warmer.cached()) == {"x@1"}
        assert refusals() == 1


@pytest.mark.parametrize("error", [EngineAwayError, NotBegunError])
async def test_a_prefix_is_computed_when_the_server_is_back(
    prefixes: Prefixes, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica, failures = Replica(prefixes._redis), 0
    compute: Generate = replica.engine.generate

    async def generate(*of: Any) -> None:
        nonlocal failures
        if failures < 3:
            failures += 1
            raise error("Connection refused")
        await compute(*of)

    monkeypatch.setattr(replica.engine, "generate", generate)
    async with replica.running():
        prefix = await declare(prefixes, "x")
        await until_kept(replica, prefix.name)
    assert failures == 3


async def test_without_prefix_caching_no_prefix_is_computed(prefixes: Prefixes) -> None:
    await declare(prefixes, "x")
    config = dataclasses.replace(INSTANT, prefix_caching=False)
    async with Replica(prefixes._redis, config=config).running("x") as replica:
        assert replica.engine.facts.pin_blocks == 0
        assert replica.warmer.cached() == {}


async def test_a_cleared_cache_is_warmed_again(prefixes: Prefixes) -> None:
    prefix = await declare(prefixes, "x")
    async with Replica(prefixes._redis).running() as replica:
        assert await replica.engine.reset_prefix_cache()
        await until(lambda: replica.engine.pins == {"x@1": 10})
        assert await replica.cached_blocks(prefix) == 10


async def test_an_empty_redis_releases_no_prefix(prefixes: Prefixes) -> None:
    await declare(prefixes, "x")
    async with Replica(prefixes._redis).running() as replica:
        known = await prefixes.all()
        await prefixes._redis.flushall()
        await asyncio.sleep(0.1)
        assert replica.engine.pins == {"x@1": 10}
        await prefixes.restore(known)
        await asyncio.sleep(0.1)
        assert replica.engine.pins == {"x@1": 10}


async def test_a_name_that_is_declared_with_other_tokens_is_computed_again(
    prefixes: Prefixes,
) -> None:
    await declare(prefixes, "x")
    async with Replica(prefixes._redis).running() as replica:
        await prefixes._redis.flushall()
        await declare(prefixes, "x", blocks=12)
        await until(lambda: replica.engine.pins == {"x@1": 12})


async def test_a_tenants_prefix_uses_the_blocks_that_all_tenants_share(
    prefixes: Prefixes,
) -> None:
    long = await declare(prefixes, "long", 10, tenant="t", namespace="salt")
    async with Replica(prefixes._redis).running("long") as replica:
        assert await replica.cached_blocks(long, Scope("", "salt")) == 10
        assert await replica.cached_blocks(long) == 0
        start = long.token_ids[: 4 * SIZE]
        await prefixes.declare(Prefix("start", 0, start, {"prompt": "s"}, is_shared=True))
        await until_kept(replica, "long@1", "start@1")
        scope = Scope("", "salt", 4 * SIZE)
        await until(lambda: replica.warmer._cached["long@1"].shared_tokens == 4 * SIZE)
        assert await replica.cached_blocks(long, scope) == 10


async def test_replicas_divide_prefixes_and_reassign_them_without_a_gap(prefixes: Prefixes) -> None:
    ids = ["a", "b"]
    prefix = await declare(prefixes, "x", replicas=1)
    home, other = sorted(ids, key=lambda id_: assigned(prefix, ids) != [id_])
    async with Replica(prefixes._redis, other).running() as first:
        assert first.engine.pins == {"x@1": 10}
        second = Replica(prefixes._redis, home)
        publisher = asyncio.create_task(second.publisher.run())
        await until_known(prefixes, home)
        await asyncio.sleep(0.1)
        assert first.engine.pins == {"x@1": 10}  # the other replica has not computed it yet
        publisher.cancel()
        async with second.running():
            await until(lambda: not first.engine.pins)
            assert second.engine.pins == {"x@1": 10}
        await until(lambda: first.engine.pins == {"x@1": 10})  # it is the only replica again


async def until_known(prefixes: Prefixes, replica_id: str) -> None:
    index = Index(prefixes._redis, "m")
    async with asyncio.timeout(60):
        while await index.record(replica_id) is None:
            await asyncio.sleep(0.01)


async def test_a_replica_that_serves_computes_slices_of_a_few_hundred_tokens(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.warmer.MAX_SLICE_S", 60.0)
    assert 128 < await largest_slice(prefixes, prefill_tokens_per_s=100_000.0) <= 256 + 1


async def test_a_slow_replica_computes_small_slices(
    prefixes: Prefixes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.features.prefixes.warmer.MAX_SLICE_S", 0.0)
    assert 0 < await largest_slice(prefixes, prefill_tokens_per_s=100_000.0) <= 64 + 1


async def largest_slice(prefixes: Prefixes, *, prefill_tokens_per_s: float) -> int:
    """Return the maximum number of tokens of a slice while an answer was running."""
    config = dataclasses.replace(
        INSTANT, prefill_tokens_per_s=prefill_tokens_per_s, decode_step_s=0.001, max_model_len=4096
    )
    async with Replica(prefixes._redis, config=config).running() as replica:
        stream = asyncio.create_task(replica.ask([1, 2, 3], max_tokens=4000))
        await declare(prefixes, "x", blocks=40)
        largest = 0
        while "x@1" not in replica.warmer.cached():
            largest = max([largest, *computed_tokens(replica.engine)])
            await asyncio.sleep(0)
        assert not stream.done()
        assert replica.engine.pins == {"x@1": 40}
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        return largest


def computed_tokens(engine: SimulatedEngine) -> list[int]:
    """Return, for each request that computes a prefix, the tokens that were not cached."""
    return [
        len(choice.job.request.token_ids) - (choice.job.cached_tokens or 0)
        for choice in engine._scheduler.running
        if choice.job.request.pin
    ]
