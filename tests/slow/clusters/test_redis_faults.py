"""Redis dies, comes back empty, is slow or hangs under steady chats; routers die; no chat fails."""

import asyncio
import contextlib
import uuid
from collections.abc import Set
from typing import Any

import httpx
import requests
from openai import OpenAI

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.store.connection import TIMEOUT_S, connect
from kvroute.store.index import FencedError, Index
from tests.support.chats import Chats, hit_share, median_ttft_s
from tests.support.clients import async_openai_client
from tests.support.redis_server import Wire, Wired
from tests.support.scraping import targets
from tests.support.serving import Cluster
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import ask, people_table, user

CHATS = 6
STEADY_S = 4.0
DELAY_S = 0.5  # of a slow Redis
AWAY_S = 6.0  # longer than a lease
TRIES = 3  # a busy machine spoils one, a fault all


def index_health(cluster: Cluster) -> Any:
    health = httpx.get(cluster.url + "/health", timeout=10)
    assert health.status_code == 200
    return health.json()["index"]


def replica_count(cluster: Cluster) -> int:
    """Fails when each answer takes as long as a call to a Redis that hangs."""
    for _ in range(TRIES):
        with contextlib.suppress(httpx.ReadTimeout):
            answer = httpx.get(cluster.url + "/v1/cluster", timeout=TIMEOUT_S - 1)
            return len(answer.json()["replicas"])
    raise AssertionError("it waits for Redis")


async def blocks_in(url: str) -> dict[str, set[Fingerprint]]:
    """By replica id."""
    client = connect(url)
    index = Index(client, BUILTIN_MODEL, cluster="faults")
    try:
        return {
            record.id: set((await index.blocks(record)).blocks) for record in await index.records()
        }
    except FencedError:
        return {}  # in the midst of being announced again
    finally:
        await client.aclose()


async def until_there(url: str, blocks: dict[str, set[Fingerprint]]) -> None:
    """Nothing is evicted here: what was announced once must be there again."""
    async with asyncio.timeout(20):
        while True:
            found = await blocks_in(url)
            if all(held <= found.get(replica_id, set()) for replica_id, held in blocks.items()):
                return
            await asyncio.sleep(0.1)


def is_right(cluster: Cluster) -> bool:
    """Whichever router is asked, it knows what the replicas hold."""
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        prompt = user(f"{uuid.uuid4()} {people_table()}")
        answers = [ask(client, prompt) for _ in range(5)]
    return all(answer.expected_tokens == answer.cached_tokens for answer in answers) and any(
        answer.cached_tokens for answer in answers
    )


async def test_redis_is_away_and_comes_back_empty(wired: Wired) -> None:
    cluster, url = wired.cluster, f"redis://127.0.0.1:{wired.port}"
    async with async_openai_client(cluster.url) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            await asyncio.sleep(STEADY_S)
            announced = await blocks_in(url)
            wired.server.close()
            before, chats.turns = chats.turns, []
            await asyncio.sleep(AWAY_S)
            health = index_health(cluster)
            assert not health["reachable"]
            assert health["age_s"] > AWAY_S - 2
            away, chats.turns = chats.turns, []
            wired.start_redis()
            await until_there(url, announced)
            back, chats.turns = chats.turns, []
            await asyncio.sleep(STEADY_S)
    assert not chats.failures
    shares = [hit_share(turns) for turns in (before, away, back + chats.turns)]
    assert min(shares) > 0.8, shares
    assert index_health(cluster)["reachable"]


async def test_a_slow_redis_delays_the_index_and_no_request(
    wired: Wired,
) -> None:
    cluster, wire = wired.cluster, wired.wire
    later_s = list[float]()
    async with async_openai_client(cluster.url) as client:
        while not later_s or later_s[-1] >= DELAY_S:
            assert len(later_s) < TRIES, later_s
            chats = Chats(client, CHATS)
            later_s.append(await delayed_s(wire, chats))
            assert not chats.failures
            assert hit_share(chats.turns) > 0.5
    await until(lambda: is_right(cluster))


async def delayed_s(wire: Wire, chats: Chats) -> float:
    """By how much first tokens come later when Redis is slow; it no longer is. The chats have the
    turns that they had meanwhile."""
    async with chats.going_on():
        await asyncio.sleep(STEADY_S)
        before, chats.turns = chats.turns, []
        wire.delay_s = DELAY_S
        await asyncio.sleep(AWAY_S)
    wire.delay_s = 0.0
    return median_ttft_s(chats.turns) - median_ttft_s(before)


async def test_a_redis_that_hangs_holds_nobody_up(wired: Wired) -> None:
    cluster, wire = wired.cluster, wired.wire
    async with async_openai_client(cluster.url) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            wire.delay_s = 3600.0
            await until(lambda: not index_health(cluster)["reachable"], within_s=20)
            assert replica_count(cluster) == 3
    assert not chats.failures
    assert chats.turns
    wire.delay_s = 0.0
    await until(lambda: index_health(cluster)["reachable"])
    await until(lambda: is_right(cluster))


def has_successor(cluster: Cluster, known: Set[str]) -> bool:
    """There are two routers again, one of which was not known."""
    with contextlib.suppress(requests.RequestException):  # the one that was asked is dead, or new
        found = targets(cluster, "router").keys()
        return len(found) == 2 and not found <= known
    return False


async def test_of_two_routers_one_is_killed(wired: Wired) -> None:
    """HAProxy cannot take up a stream that broke; what comes afterwards is not affected."""
    cluster = wired.cluster
    wait_for_fleet(cluster)
    async with async_openai_client(cluster.url, max_retries=2) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            await asyncio.sleep(STEADY_S)
            before, chats.turns = chats.turns, []
            known = targets(cluster, "router").keys()
            cluster.routers()[0].kill()
            await until(lambda: has_successor(cluster, known))
            await asyncio.sleep(STEADY_S)  # in which it takes its share
    wait_for_fleet(cluster)
    assert len(chats.failures) <= CHATS  # those that were in their midst
    assert hit_share(chats.turns) > 0.9 * hit_share(before)
