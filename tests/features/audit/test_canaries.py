"""A canary says whether a replica's blocks come to where routers look for them, or where not."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from kvroute.features.audit import canaries
from kvroute.features.audit.audit_checks import canaries as checks
from kvroute.features.audit.canaries import Account, Canaries, Result, cause_of
from kvroute.local.ports import free_port
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.features.audit.side import MODEL, Side
from tests.support.records import facts, record
from tests.support.waiting import until

ALL = {"expected": 3, "redis": 3, "mirror": 3}
NONE = {"expected": 3, "redis": 0, "mirror": 0}
CANARY = {
    "id": "a",
    "answered_s": 0.01,
    "seen_s": 0.01,
    "blocks": {"expected": 3, "redis": 3, "mirror": 3},
    "cause": None,
    "detail": "",
}


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For blocks that do not come."""
    monkeypatch.setattr(canaries, "APPEAR_S", 0.5)


@pytest.fixture
async def side(redis_url: str) -> AsyncIterator[Side]:
    side = await begin(redis_url)
    yield side
    await side.close()


async def begin(redis_url: str, **how: Any) -> Side:
    """On an empty Redis; the router knows the replica."""
    async with connect(redis_url) as redis:
        await redis.flushall()
    side = Side(redis_url, **how)
    await until(lambda: side.fleet.replicas.records)
    return side


async def sent(side: Side, index: Index | None = None) -> Any:
    """The report on the one replica."""
    links = cast("Links", side)
    (report,) = await Canaries(index or side.index, side.fleet, links, block_size=4).run()
    return report


async def test_where_all_is_well_its_blocks_are_seen_each_time(side: Side) -> None:
    for _ in range(2):
        report = await sent(side)
        assert (report["cause"], report["blocks"]) == (None, ALL)
        assert report["answered_s"] > 0
        assert report["seen_s"] >= 0
    assert side.publisher.blocks == 6  # they shared nothing


@pytest.mark.usefixtures("short_wait")
async def test_a_publisher_that_stopped_is_told_from_a_router_that_does_not_listen(
    side: Side,
) -> None:
    side.feeding.cancel()
    report = await sent(side)
    assert (report["cause"], report["blocks"]) == ("not in the mirror", ALL | {"mirror": 0})
    side.publishing.cancel()
    report = await sent(side)
    assert (report["cause"], report["blocks"]) == ("nothing published", NONE)


@pytest.mark.usefixtures("short_wait")
async def test_blocks_that_come_under_other_fingerprints_are_missed(redis_url: str) -> None:
    side = await begin(redis_url, revision="another")
    report = await sent(side)
    assert (report["cause"], report["blocks"]) == ("other fingerprints", NONE)
    await side.close()


async def test_a_replica_that_is_not_registered_is_found(side: Side) -> None:
    side.publishing.cancel()
    await side.redis.flushall()
    assert (await sent(side))["cause"] == "not in the index"


async def test_a_replica_that_caches_nothing_is_not_waited_for(redis_url: str) -> None:
    side = await begin(redis_url, facts=facts(prefix_caching=False), revision="another")
    report = await sent(side)
    assert (report["cause"], report["seen_s"]) == ("caching is off", None)
    await side.close()


async def test_a_replica_that_does_not_answer_says_why(
    side: Side, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(request: GenerateRequest) -> None:
        raise UnansweredError("it is silent for 15 s")

    monkeypatch.setattr(side, "generate", refuse)
    report = await sent(side)
    assert (report["cause"], report["detail"]) == ("no answer", "it is silent for 15 s")
    assert (report["answered_s"], report["blocks"]["redis"]) == (None, None)


async def test_without_redis_it_is_known_that_the_replica_answers(side: Side) -> None:
    side.feeding.cancel()
    async with connect(f"redis://127.0.0.1:{free_port()}") as nowhere:
        report = await sent(side, index=Index(nowhere, MODEL))
    assert report["cause"] == "Redis is away"
    assert report["answered_s"] > 0
    assert report["blocks"] == {"expected": 3, "redis": None, "mirror": 0}


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({}, "nothing published"),
        ({"seq": 9}, "other fingerprints"),
        ({"seq": 9, "incarnation": "later"}, "Redis is away"),  # it registers again and again
    ],
)
def test_a_redis_that_refuses_writes_is_told_from_other_fingerprints(
    change: dict[str, Any], cause: str
) -> None:
    before, after = Account(record("a")), Account(replace(record("a"), **change))
    assert cause_of(Result(3, before, answered_s=1.0, after=after)) == cause


async def test_a_canary_fits_where_little_fits(redis_url: str) -> None:
    side = await begin(redis_url, facts=facts(max_model_len=11))
    assert (await sent(side))["blocks"] == {"expected": 2, "redis": 2, "mirror": 2}
    await side.close()


def test_successful_canaries_share_a_line_and_lost_ones_have_a_line_each() -> None:
    lost = CANARY | {"id": "b", "cause": "nothing published", "seen_s": None}
    lost["blocks"] = {"expected": 3, "redis": 0, "mirror": 0}
    ranks = [CANARY | {"id": id_} for id_ in ("a.0", "a.1", "c")]
    seen, wrong = checks({"router": "r1", "replicas": [lost, *ranks]})
    assert seen.grade == "ok"
    assert "by 2 replicas" in seen.finding
    assert (wrong.name, wrong.grade) == ("canary of b", "wrong")
    assert wrong.finding == "nothing published; of 3 blocks 0 in Redis, 0 in the router"
    assert wrong.remedy


def test_a_canary_without_caching_is_ok() -> None:
    (check,) = checks({"router": "r1", "replicas": [CANARY | {"cause": "caching is off"}]})
    assert check.grade == "ok"
