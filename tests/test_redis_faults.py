"""Redis dies, comes back empty, is slow or hangs under steady chats; routers die; no chat fails."""

import asyncio
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import FencedError, Index, connect
from replica.model import BUILTIN_MODEL
from router.ports import free_port
from tests.chats import Chats, hit_share
from tests.redis_server import redis_server
from tests.serving import Cluster, start_cluster

pytestmark = pytest.mark.timeout(240)

CHATS = 6
STEADY_S = 8.0
AWAY_S = 12.0
SERVE = ("--engine", "simulated", "--replicas", "3", "--simulated-decode-ms", "5")


def open_client(cluster: Cluster, max_retries: int = 0) -> AsyncOpenAI:
    url = f"{cluster.url}/v1"
    return AsyncOpenAI(base_url=url, api_key="none", max_retries=max_retries, timeout=60)


def index_health(cluster: Cluster) -> Any:
    health = httpx.get(cluster.url + "/health", timeout=10)
    assert health.status_code == 200
    return health.json()["index"]


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


async def test_redis_is_away_and_comes_back_empty(tmp_path: Path) -> None:
    port = free_port()
    with ExitStack() as running:
        server = running.enter_context(ExitStack())
        url = server.enter_context(redis_server(port, tmp_path))
        cluster = running.enter_context(start_cluster(*SERVE, "--redis-url", url))
        async with open_client(cluster) as client:
            chats = Chats(client, CHATS)
            async with chats.going_on():
                await asyncio.sleep(STEADY_S)
                announced = await blocks_in(url)
                server.close()
                before, chats.turns = chats.turns, []
                await asyncio.sleep(AWAY_S)
                health = index_health(cluster)
                assert not health["reachable"]
                assert AWAY_S - 2 < health["age_s"] < AWAY_S + 2
                away, chats.turns = chats.turns, []
                server.enter_context(redis_server(port, tmp_path))
                await until_there(url, announced)
                back, chats.turns = chats.turns, []
                await asyncio.sleep(STEADY_S)
        assert not chats.failures
        shares = [hit_share(turns) for turns in (before, away, back + chats.turns)]
        assert min(shares) > 0.9, shares
        assert index_health(cluster)["reachable"]
