"""What a node that goes away gives to others: its conversations."""

import asyncio
import subprocess
from collections import Counter
from collections.abc import Iterator

import httpx
import pytest

from tests.support.audience import Audience
from tests.support.clients import async_openai_client
from tests.support.hosts import HOME, Host
from tests.support.nodes import ON_NODES, Nodes, ray_up
from tests.support.waiting import until, wait_until

pytestmark = [*ON_NODES, pytest.mark.timeout(900)]

REPLICAS = 3  # more than fit on one worker, so that both workers have some
CHATS = 24
HISTORY = 2000  # tokens
HIT_SHARE = 0.9
WITHIN_S = 120


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    args = {"engine": "simulated", "simulated_decode_ms": 50, "replicas": REPLICAS}
    tiers = {"host_cache_gb": 32, "pull": "on", "simulated_prefill_tokens_per_s": 5000}
    with ray_up(workers=2, args=args | tiers) as nodes:
        wait_until(lambda: all(chat(nodes).is_success for _ in range(10)))  # of both routers
        yield nodes


def chat(nodes: Nodes) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
    return httpx.post(f"{nodes.url}/v1/chat/completions", json=body, timeout=60)


def drain(nodes: Nodes, host: Host) -> subprocess.CompletedProcess[str]:
    """Run `kvroute drain` on a node."""
    login = ("ssh", "-i", str(nodes.network.key), "-o", "StrictHostKeyChecking=no")
    command = f"{HOME}/kvroute/.venv/bin/kvroute drain --within {WITHIN_S}"
    words = [*login, f"root@{host.address}", command]
    return subprocess.run(words, capture_output=True, text=True, timeout=2 * WITHIN_S)


async def turn(client: httpx.AsyncClient, chat: int, *, more: int = 0) -> tuple[str, int]:
    """Return the replica that answered, and how many tokens it had cached."""
    prompt = [*range(chat, chat + HISTORY)] + [chat + 7] * more
    response = await client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    response.raise_for_status()
    usage = response.json()["usage"]
    return response.headers["x-kvroute-replica"], usage["prompt_tokens_details"]["cached_tokens"]


async def test_the_head_cannot_be_emptied(nodes: Nodes) -> None:
    done = await asyncio.to_thread(drain, nodes, nodes.head)
    assert done.returncode == 1
    assert "head" in done.stderr


async def test_a_node_is_emptied_while_clients_listen(nodes: Nodes) -> None:
    async with (
        async_openai_client(nodes.url, timeout_s=120) as openai,
        httpx.AsyncClient(base_url=nodes.url, timeout=60) as client,
    ):
        undisturbed = await Audience(openai, 100).listen()
        where = [(await turn(client, chat))[0] for chat in range(CHATS)]
        index = nodes.index()
        ((address, _),) = Counter(index.values()).most_common()[1:]
        leaving = nodes.worker(address)  # the one with one replica
        moved = [chat for chat in range(CHATS) if index[where[chat]] == leaving.address]
        assert 0 < len(moved) < CHATS
        audience, over = Audience(openai, 100), asyncio.Event()
        listening = asyncio.create_task(audience.listen_until(over))
        await until(lambda: min(audience.pieces) >= 5)

        done = await asyncio.to_thread(drain, nodes, leaving)
        assert done.returncode == 0, done.stdout + done.stderr
        cached = [(await turn(client, chat, more=100))[1] for chat in moved]
        await until(lambda: leaving.address not in nodes.index().values())
        leaving.kill()  # its provider takes it away
        over.set()
        heard = await listening
    for answer, answers in zip(undisturbed, heard, strict=True):
        assert {*answers} == {answer}
    print(f"{len(moved)} conversations; at least {min(cached)} of {HISTORY} tokens cached")
    assert min(cached) >= HIT_SHARE * HISTORY
