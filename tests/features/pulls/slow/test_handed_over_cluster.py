"""A cluster shrinks under load, and the removed replica's conversations stay cached."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress

import httpx
import pytest

from tests.support.hits import hit_tokens
from tests.support.scraping import total
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import until

OPTIONS = ("--engine", "simulated", "--replicas", "3", "--host-cache-gb", "32", "--pull", "on")
CHATS = 24
HISTORY = 2000  # tokens
TURN = 100  # tokens of the next turn
FOUND = 0.9 * HISTORY  # cached tokens of a history that was handed over

numbers = itertools.count(10_000)


@pytest.fixture(scope="module")
def shrinking() -> Iterator[Cluster]:
    with start_cluster(*OPTIONS, "--simulated-prefill-tokens-per-s", "2000") as cluster:
        yield cluster


async def test_the_chats_of_a_removed_replica_find_their_history_elsewhere(
    shrinking: Cluster,
) -> None:
    async with httpx.AsyncClient(base_url=shrinking.url, timeout=60) as client:
        where = [(await turn(client, chat))[0] for chat in range(CHATS)]
        async with load(client):
            await scale(shrinking, 2)
            gone = {*where} - {*replicas(shrinking)}
            moved = [chat for chat in range(CHATS) if where[chat] in gone]
            assert 0 < len(moved) < CHATS
            await until(lambda: handed_over(shrinking) >= len(moved))
            for chat in moved:  # the prompts of the load are handed over, too
                await until(lambda: hit_tokens(shrinking, prompt=history(chat)) >= FOUND)  # noqa: B023
            cached = [(await turn(client, chat, more=TURN))[1] for chat in moved]
    assert min(cached) >= FOUND


async def test_a_replica_that_nobody_can_replace_is_removed_at_once(shrinking: Cluster) -> None:
    async with httpx.AsyncClient(base_url=shrinking.url, timeout=60) as client:
        last, cached = await turn(client, 0, more=TURN)
        assert cached >= FOUND
        await scale(shrinking, 1)
        await until(lambda: replicas(shrinking) == [last] or len(replicas(shrinking)) == 1)


def handed_over(cluster: Cluster) -> float:
    figures, name = total(cluster, "router"), "kvroute_handed_over_prompts_total"
    return figures[f"{name}{{moved}}"] + figures[f"{name}{{held}}"]


@asynccontextmanager
async def load(client: httpx.AsyncClient) -> AsyncIterator[None]:
    """Send new prompts, one after the other in each of three tasks."""

    async def send() -> None:
        while True:
            await turn(client, next(numbers))

    tasks = [asyncio.create_task(send()) for _ in range(3)]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


def history(chat: int) -> list[int]:
    """Return the token ids of a chat's first turn."""
    return [*range(chat, chat + HISTORY)]


async def turn(client: httpx.AsyncClient, chat: int, *, more: int = 0) -> tuple[str, int]:
    """Return the replica that answered, and how many tokens it had cached."""
    prompt = history(chat) + [chat + 7] * more
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    response.raise_for_status()
    usage = response.json()["usage"]
    return response.headers["x-kvroute-replica"], usage["prompt_tokens_details"]["cached_tokens"]


async def scale(cluster: Cluster, count: int) -> None:
    command = [*KVROUTE, "scale", str(count), "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    await until(lambda: len(replicas(cluster)) == count)


def replicas(cluster: Cluster) -> list[str]:
    """Return the ids of the replicas in the index."""
    listed = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [replica["id"] for replica in listed]
