"""Pictures of dashboards for the documents, from a simulated fleet at mixed work: four chats,
documents that many ask about, a named prefix, a salt; a cache is cleared, and everybody asks about
one thing.

    python -m tests.support.screenshots        # takes five minutes; writes docs/*.png
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import httpx
from openai import AsyncOpenAI

from dashboards.build import DASHBOARDS
from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.chats import Chats
from tests.support.clearing import cache_clearer
from tests.support.clients import async_openai_client
from tests.support.picture import Prometheus, picture
from tests.support.prometheus_server import prometheus
from tests.support.serving import Cluster, start_cluster

DOCS = Path(__file__).parents[2] / "docs"
SHOWN = ("kvroute-cache-hits", "kvroute-fleet")
MINUTES = 4.0
CLEAR_AT, RUSH_AT = 0.45, 0.75  # of that time
CLUSTER = (
    *("--engine", "simulated", "--replicas", "3", "--routers", "2", "--max-model-len", "4096"),
    *("--simulated-blocks", "900", "--simulated-prefill-tokens-per-s", "4000"),
)
WEIGHTS = (6, 1, 3)  # of asking about a document, under a salt, going on from a prefix
RULES = "The tenant shall not keep a lion. " * 60


class Readers:
    """Ask about documents, some more often than others."""

    def __init__(self, client: AsyncOpenAI, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self._documents = [self._tokens(rng.randint(600, 2400)) for _ in range(40)]
        self._popularity = [1 / (rank + 1) for rank in range(len(self._documents))]

    async def ask(self) -> None:
        (document,) = self._rng.choices(self._documents, self._popularity)
        await self._complete([*document, *self._tokens(60)])

    async def ask_under_a_salt(self) -> None:
        await self._complete(self._documents[0], cache_salt=f"tenant {self._rng.randint(1, 4)}")

    async def go_on_from_the_rules(self) -> None:
        prefix_id = self._rng.choice(["rules", "rules", "rules", "rules in brief"])
        await self._complete(self._tokens(40), prefix_id=prefix_id)

    async def rush(self) -> None:
        """Everybody has a long question about the same few documents."""
        prompts = [[*self._documents[i % 4], *self._tokens(900)] for i in range(40)]
        await asyncio.gather(*map(self._complete, prompts))

    async def _complete(self, prompt: Sequence[int], **extra: str) -> None:
        await self._client.completions.create(
            model=BUILTIN_MODEL, prompt=list(prompt), max_tokens=24, extra_body=extra
        )

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(1000, 40_000) for _ in range(count)]


async def work(cluster: Cluster) -> None:
    """For MINUTES."""
    async with async_openai_client(cluster.url) as client, asyncio.TaskGroup() as group:
        readers, seconds = Readers(client, random.Random(0)), 60 * MINUTES
        requests = [readers.ask, readers.ask_under_a_salt, readers.go_on_from_the_rules]
        group.create_task(_later(CLEAR_AT * seconds, lambda: _clear(cluster)))
        group.create_task(_later(RUSH_AT * seconds, readers.rush))
        async with Chats(client, 4, think_s=2).going_on():
            rng = random.Random(1)
            ends_s = asyncio.get_running_loop().time() + seconds
            while asyncio.get_running_loop().time() < ends_s:
                group.create_task(rng.choices(requests, WEIGHTS)[0]())
                await asyncio.sleep(rng.expovariate(4.0))


async def _later(seconds: float, act: Callable[[], Awaitable[None]]) -> None:
    await asyncio.sleep(seconds)
    await act()


async def _clear(cluster: Cluster) -> None:
    async with httpx.AsyncClient(base_url=cluster.url) as client:
        replicas = (await client.get("/v1/cluster")).json()["replicas"]
    largest = max(replicas, key=lambda replica: replica["blocks"])

    def clear() -> None:
        with cache_clearer(cluster) as clear:
            clear(largest["id"])

    await asyncio.to_thread(clear)


def main() -> None:
    DOCS.mkdir(exist_ok=True)
    with start_cluster(*CLUSTER) as cluster, prometheus(cluster) as server:
        for name, text in (("rules", RULES), ("rules in brief", RULES[:700])):
            declaration = {"id": name, "prompt": text}
            httpx.post(f"{cluster.url}/v1/prefixes", json=declaration).raise_for_status()
        asyncio.run(work(cluster))
        for dashboard in DASHBOARDS:
            if dashboard.uid in SHOWN:
                file = DOCS / f"{dashboard.uid.removeprefix('kvroute-')}.png"
                picture(dashboard, Prometheus(server.url, MINUTES)).savefig(file)


if __name__ == "__main__":
    main()
