"""Redis dies, comes back empty, is slow or hangs under steady chats; routers die; no chat fails."""

import asyncio
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import ANSWER_S, FencedError, Index, connect
from replica.model import BUILTIN_MODEL
from router.command.ports import free_port
from tests.chats import Chats, hit_share, median_ttft_s
from tests.conftest import async_openai_client
from tests.redis_server import Wire, redis_server
from tests.serving import Cluster, start_cluster
from tests.waiting import until
from tests.workloads import ask, people_table, user

pytestmark = pytest.mark.timeout(240)

CHATS = 6
STEADY_S = 5.0
AWAY_S = 8.0
SUCCESSOR_S = 12.0  # in which a killed router's successor starts and takes its share
SERVE = ("--engine", "simulated", "--replicas", "3", "--simulated-decode-ms", "5")


def index_health(cluster: Cluster) -> Any:
    health = httpx.get(cluster.url + "/health", timeout=10)
    assert health.status_code == 200
    return health.json()["index"]


def replica_count(cluster: Cluster) -> int:
    """Fails when the answer takes as long as a call to a Redis that hangs."""
    answer = httpx.get(cluster.url + "/v1/cluster", timeout=ANSWER_S - 1)
    return len(answer.json()["replicas"])


async def blocks_in(url: str) -> dict[str, set[Fingerprint]]:
    """By replica id."""
    client = connect(url)
    index = Index(client, BUILTIN_MODEL)
    try:
        return {each.id: set((await index.blocks(each)).blocks) for each in await index.records()}
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


def router_process(cluster: Cluster) -> psutil.Process:
    """One of them."""
    return next(each for each in cluster.processes() if "Router" in " ".join(each.cmdline()))


def is_right(cluster: Cluster) -> bool:
    """Whichever router is asked, it knows what the replicas hold."""
    with OpenAI(base_url=f"{cluster.url}/v1", api_key="none") as client:
        prompt = user(f"{uuid.uuid4()} {people_table()}")
        answers = [ask(client, prompt) for _ in range(5)]
    return all(each.expected_tokens == each.cached_tokens for each in answers) and any(
        each.cached_tokens for each in answers
    )


async def test_redis_is_away_and_comes_back_empty(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as running:
        server = running.enter_context(ExitStack())
        url = server.enter_context(redis_server(port, tmp_path))
        cluster = running.enter_context(start_cluster(*SERVE, "--redis-url", url))
        async with async_openai_client(cluster.url) as client:
            chats = Chats(client, CHATS)
            async with chats.going_on():
                await asyncio.sleep(STEADY_S)
                announced = await blocks_in(url)
                server.close()
                before, chats.turns = chats.turns, []
                await asyncio.sleep(AWAY_S)
                health = index_health(cluster)
                assert not health["reachable"]
                assert health["age_s"] > AWAY_S - 2
                away, chats.turns = chats.turns, []
                server.enter_context(redis_server(port, tmp_path))
                await until_there(url, announced)
                back, chats.turns = chats.turns, []
                await asyncio.sleep(STEADY_S)
        assert not chats.failures
        shares = [hit_share(turns) for turns in (before, away, back + chats.turns)]
        assert min(shares) > 0.9, shares
        assert index_health(cluster)["reachable"]


@pytest.fixture(scope="module")
def wired(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Wire]]:
    """Two routers and a Redis that are as far apart as the test says."""
    port = free_port()
    with redis_server(port, tmp_path_factory.mktemp("redis")):
        wire = Wire(free_port(), port)
        with (
            wire.running(),
            start_cluster(*SERVE, "--routers", "2", "--redis-url", wire.url) as cluster,
        ):
            yield cluster, wire
            wire.delay_s = 0.0


async def test_a_slow_redis_delays_the_index_and_no_request(
    wired: tuple[Cluster, Wire],
) -> None:
    cluster, wire = wired
    async with async_openai_client(cluster.url) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            await asyncio.sleep(STEADY_S)
            before, chats.turns = chats.turns, []
            wire.delay_s = 0.5
            await asyncio.sleep(AWAY_S)
    assert not chats.failures
    assert median_ttft_s(chats.turns) < median_ttft_s(before) + wire.delay_s
    assert hit_share(chats.turns) > 0.5
    wire.delay_s = 0.0
    await until(lambda: is_right(cluster), within_s=30)


async def test_a_redis_that_hangs_holds_nobody_up(wired: tuple[Cluster, Wire]) -> None:
    cluster, wire = wired
    async with async_openai_client(cluster.url) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            wire.delay_s = 3600.0
            await until(lambda: not index_health(cluster)["reachable"], within_s=20)
            assert replica_count(cluster) == 3
    assert not chats.failures
    assert chats.turns
    wire.delay_s = 0.0
    await until(lambda: index_health(cluster)["reachable"], within_s=30)
    await until(lambda: is_right(cluster), within_s=30)


async def test_of_two_routers_one_is_killed(wired: tuple[Cluster, Wire]) -> None:
    """HAProxy cannot take up a stream that broke; what comes afterwards is not affected."""
    cluster, _ = wired
    async with async_openai_client(cluster.url, max_retries=2) as client:
        chats = Chats(client, CHATS)
        async with chats.going_on():
            await asyncio.sleep(STEADY_S)
            before, chats.turns = chats.turns, []
            router_process(cluster).kill()
            await asyncio.sleep(SUCCESSOR_S)
    assert len(chats.failures) <= CHATS  # those that were in their midst
    assert hit_share(chats.turns) > 0.9 * hit_share(before)
