"""A real cluster shrinks, and the chats of the replica that left find their history elsewhere."""

import asyncio

import httpx
from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.scraping import total
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import until

SERVE = ("--engine", "simulated", "--replicas", "3", "--simulated-prefill-tokens-per-s", "5000")
CHATS = 9
HISTORY = 2000  # tokens
COMPUTED, TOKENS = "kvroute_handed_over_prompts_total{computed}", "kvroute_handed_over_tokens_total"


async def test_chats_of_a_replica_that_was_taken_away_find_their_history_cached() -> None:
    with start_cluster(*SERVE) as cluster:
        async with async_openai_client(cluster.url) as client:
            homes = [(await turn(client, chat))[0] for chat in range(CHATS)]
            await scale(cluster, 2)
            gone = {*homes} - {*replicas(cluster)}
            moved = [chat for chat in range(CHATS) if homes[chat] in gone]
            assert 0 < len(moved) < CHATS
            told = total(cluster, "router")
            while told[COMPUTED] < len(moved):
                await asyncio.sleep(0.2)
                told = total(cluster, "router")
            assert told[TOKENS] >= len(moved) * (HISTORY - 100)
            assert told["kvroute_requests_total{ok}"] == CHATS  # they are nobody's requests
            cached = [(await turn(client, chat, is_next=True))[1] for chat in moved]
    assert min(cached) >= HISTORY - 100


async def turn(client: AsyncOpenAI, chat: int, *, is_next: bool = False) -> tuple[str, int]:
    """The replica that answered, and how many tokens it had cached."""
    history = [*range(1000 + chat, 1000 + chat + HISTORY)]
    raw = await client.completions.with_raw_response.create(
        model=BUILTIN_MODEL, prompt=history + [500 + chat] * 200 * is_next, max_tokens=1
    )
    usage = raw.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    return raw.headers["x-kvroute-replica"], usage.prompt_tokens_details.cached_tokens or 0


async def scale(cluster: Cluster, count: int) -> None:
    """Fails with what the command printed when it fails."""
    command = [*KVROUTE, "scale", str(count), "--url", cluster.url]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    await until(lambda: len(replicas(cluster)) == count)


def replicas(cluster: Cluster) -> list[str]:
    """Ids of those in the index."""
    listed = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [replica["id"] for replica in listed]
