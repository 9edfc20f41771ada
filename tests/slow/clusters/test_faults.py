"""Replicas die and hang while fifty clients listen, and none of them notices."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import httpx
import psutil
import pytest
from openai import APIError, AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.audience import Audience
from tests.support.clients import async_openai_client
from tests.support.serving import Cluster
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet

BRIEF, LENGTHY = 1, 3000  # words in a prompt; the lengthy ones queue for their first token


@pytest.fixture
def cluster(trio: Cluster) -> Cluster:
    return trio


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with async_openai_client(cluster.url) as client:
        yield client


def replicas(cluster: Cluster) -> dict[str, Any]:
    """By id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: replica for replica in listed}


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_answers_under_way_go_on_elsewhere(
    cluster: Cluster, client: AsyncOpenAI, blow: signal.Signals
) -> None:
    """Every answer is in its midst."""
    wait_for_fleet(cluster)
    undisturbed = await Audience(client, BRIEF).listen()
    audience = Audience(client, BRIEF)
    listening = asyncio.create_task(audience.listen())
    await until(lambda: min(audience.pieces) >= 5)
    victim = replicas(cluster)[audience.replicas[0]]
    os.kill(victim["pid"], blow)
    assert await listening == undisturbed
    await until(lambda: not psutil.pid_exists(victim["pid"]))
    wait_for_fleet(cluster)


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
async def test_requests_that_wait_for_their_first_token_are_answered_elsewhere(
    cluster: Cluster, client: AsyncOpenAI, blow: signal.Signals
) -> None:
    """Most of them are in the engine's queue, behind the first one to be answered."""
    wait_for_fleet(cluster)
    undisturbed = await Audience(client, LENGTHY).listen()
    audience = Audience(client, LENGTHY)
    listening = asyncio.create_task(audience.listen())
    await until(lambda: max(audience.pieces) >= 1)
    victim = replicas(cluster)[next(filter(None, audience.replicas))]
    os.kill(victim["pid"], blow)
    assert await listening == undisturbed
    await until(lambda: not psutil.pid_exists(victim["pid"]))
    wait_for_fleet(cluster)


async def test_an_answer_that_cannot_go_on_ends_in_an_error(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    wait_for_fleet(cluster)
    stream = await client.chat.completions.create(
        model=BUILTIN_MODEL,
        messages=[{"role": "user", "content": "What cannot go on?"}],
        max_tokens=1500,  # its end does not come first
        stream=True,
        n=2,
    )
    victim = replicas(cluster)[stream.response.headers["x-kvroute-replica"]]
    os.kill(victim["pid"], signal.SIGKILL)
    with pytest.raises(APIError, match="lost while it answered"):
        [event async for event in stream]
    wait_for_fleet(cluster)
