"""An audit counts the differences in the index, and finds none if everything is correct."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import TierFacts
from kvroute.doctor.checks import Check
from kvroute.features.audit.audit_checks import audits
from kvroute.replica.engine.kv_events import BlockRemoved, EventsLost
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from tests.features.audit.side import Side
from tests.support.mirrors import held_by
from tests.support.records import NO_DRIFT
from tests.support.waiting import until


@pytest.fixture
async def side(redis_url: str) -> AsyncIterator[Side]:
    """Yield a side whose mirror has received all blocks of some requests."""
    side = Side(redis_url)
    await side.redis.flushall()
    await side.work(20)
    await until(lambda: held_by(side.fleet.mirror, "a") == set(side.table.held()) != set())
    yield side
    await side.close()


async def test_there_is_no_drift_while_blocks_are_stored_and_evicted(side: Side) -> None:
    working = asyncio.create_task(side.work(300))
    while not working.done():
        assert await side.drift() == NO_DRIFT
    await working


async def test_blocks_in_host_memory_are_also_audited_separately(redis_url: str) -> None:
    side = Side(redis_url, host=TierFacts(150, 1, 1e9))
    await side.redis.flushall()
    await side.work(20)
    await until(lambda: held_by(side.fleet.mirror, "a") == set(side.table.held()) != set())
    working = asyncio.create_task(side.work(200))
    while not working.done():
        assert await side.drift() == NO_DRIFT
    await working
    known = len(side.table.in_host)
    expected = {"blocks": {"engine": known, "replica": known}, "drift": 0}
    assert 100 < known <= 150
    assert (await side.audited())["in_host"] == expected
    lost = [*side.table.in_host][:3]
    side.publisher.publish([BlockRemoved(lost, group=1)])
    report = await side.audited()
    assert report["in_host"] == expected | {
        "blocks": {"engine": known, "replica": known - 3},
        "drift": 3,
    }
    assert "in host memory, with a drift of 3" in checked(report).finding
    await side.close()


async def test_missing_and_additional_blocks_in_a_mirror_are_drift_and_are_repaired(
    side: Side,
) -> None:
    side.fleet.mirror.remove("a", side.table.held()[:3])
    side.fleet.mirror.add("a", [Fingerprint(1)])
    assert (await side.drift())["mirror"] == 4
    await until(lambda: held_by(side.fleet.mirror, "a") == set(side.table.held()))
    assert await side.drift() == NO_DRIFT
    assert side.router.drift == {**NO_DRIFT, "mirror": 4}


async def test_a_wrong_set_in_redis_is_drift_and_is_repaired(
    side: Side,
) -> None:
    key = side.index._blocks_key("a", side.publisher._writer_state.incarnation)
    await side.redis.spop(key)
    await side.redis.sadd(key, b"surplus!")  # the set's size does not show the difference
    assert (await side.ask()).index.drift == 2
    await until(lambda: side.publisher._is_registered)
    assert (await side.ask()).index.drift == 0


async def test_lost_events_are_drift_until_the_engine_lists_its_blocks(
    side: Side,
) -> None:
    known = side.table.held()
    await side.engine.reset_prefix_cache()
    side.engine._events.clear()
    assert (await side.ask()).known.drift == len(known)
    assert await side.drift() == NO_DRIFT


async def test_after_lost_events_evicted_blocks_are_removed_without_an_audit(side: Side) -> None:
    await side.engine.reset_prefix_cache()
    side.engine._events[:] = [EventsLost()]
    await until(lambda: len(side.table) == 0)


async def test_a_replica_that_caches_nothing_has_no_drift(redis_url: str) -> None:
    side = Side(redis_url)
    side.engine.facts = SimulatedEngine(SimulatedConfig(prefix_caching=False)).facts
    assert (await side.ask()).known.blocks == 0
    await side.close()


def checked(report: dict[str, Any]) -> Check:
    (check,) = audits({"router": "r1", "replicas": [report]})
    return check


def report(**drift: int | None) -> dict[str, Any]:
    blocks = {"engine": 9, "replica": 9, "redis": 9, "mirror": 9}
    return {"id": "a", "blocks": blocks, "drift": {**NO_DRIFT, **drift}}


def test_the_doctor_names_the_wrong_copy() -> None:
    assert checked(report()).grade == "ok"
    assert "host" not in checked(report()).finding
    assert "drift of 2 in Redis" in checked(report(redis=2)).finding
    assert "no answer from router r1" in checked(report(mirror=None)).finding
    assert checked(report(redis=2)).remedy


async def test_replicas_of_another_deployment_are_not_audited(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They cannot be asked, and their own routers audit them."""
    assert [report["id"] for report in await side.router.run()] == ["a"]
    monkeypatch.setattr(side.fleet.replicas, "is_own", lambda replica_id: False)
    assert await side.router.run() == []
