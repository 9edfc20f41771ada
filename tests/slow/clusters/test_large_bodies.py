"""Whatever body one client sends, its router answers others, and the router keeps its memory."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from httpx import Response

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import Cluster

SENT_AT_ONCE = 8
LONGEST_WAIT_S = 1.0  # far above what a busy computer causes, and far below what they once took
BUSY_WAIT_S = 3.0  # beside thousands of prompts that are all answered
# Of the time that all bodies take: half of what others wait if each is parsed in their way.
LONGEST_SHARE = 0.5 / SENT_AT_ONCE
TRIES = 3
GROWTH = 12  # bytes of a router for each byte of the bodies that are sent at once
HELD_BYTES = 100e6  # that a router may take whatever the size


def body(**fields: Any) -> bytes:
    return json.dumps({"model": BUILTIN_MODEL, "max_tokens": 1, **fields}).encode()


def user(content: str) -> dict[str, str]:
    return {"role": "user", "content": content}


WORDS = "some words and more of them "
ANSWERED = "hundreds of prompts"
BODIES = {
    ANSWERED: ("completions", body(prompt=[WORDS] * 500)),
    "a thousand long prompts": ("route", body(prompt=[WORDS * 100] * 1000)),
    "half a million messages": ("chat/completions", body(messages=[user("")] * 500_000)),
    "eight thousand messages": ("chat/completions", body(messages=[user(WORDS)] * 8000)),
    "a long bad seed": ("completions", body(prompt="hi", seed="7" * 15_000_000)),
    "a long model": ("completions", body(prompt="hi") + b" " * 10_000_000),
    "millions of lists": ("completions", b'{"prompt": [' + b"[]," * 1_000_000 + b"[]]}"),
    "millions of ids": ("completions", body(prompt=[7] * 3_000_000)),
    "one long text": ("completions", body(prompt=WORDS * 500_000)),
    "many stops": ("completions", body(prompt=["hi"] * 1000, stop=["x" * 1000] * 64)),
    "a long salt": ("completions", body(prompt=["hi"] * 300, cache_salt="x" * 8_000_000)),
    "an unknown prefix": ("completions", body(prompt="hi", prefix_id="x" * 128)),
}


@pytest.fixture
def cluster(pair: Cluster) -> Cluster:
    """With one router: who is held up is held up by it."""
    return pair


@asynccontextmanager
async def pulse(url: str) -> AsyncIterator[list[float]]:
    """Asks the router how it is until the block ends; gets the seconds that each answer took.
    Engines have no part in it, so it is the router that holds up whoever waits."""
    waits: list[float] = []
    over = asyncio.Event()

    async def ask() -> None:
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            while not over.is_set():
                began_s = time.monotonic()
                (await client.get("/health")).raise_for_status()
                waits.append(time.monotonic() - began_s)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(ask())
        yield waits
        over.set()


async def held_up_s(
    cluster: Cluster, path: str, content: bytes
) -> tuple[float, float, list[Response]]:
    """The longest wait of somebody else while many such bodies are sent, the time that these take,
    and their answers."""
    client = httpx.AsyncClient(base_url=cluster.url, timeout=120)
    async with client, pulse(cluster.url) as waits:
        began_s = time.monotonic()
        sending = [client.post(f"/v1/{path}", content=content) for _ in range(SENT_AT_ONCE)]
        answers = await asyncio.gather(*sending)
        took_s = time.monotonic() - began_s
    return max(waits), took_s, answers


@pytest.mark.parametrize("name", BODIES)
async def test_no_body_holds_up_others(cluster: Cluster, name: str) -> None:
    path, content = BODIES[name]
    before = cluster.routers()[0].memory_full_info().uss
    longest_s = BUSY_WAIT_S if name == ANSWERED else LONGEST_WAIT_S
    waits: list[float] = []  # in longest ones
    while not waits or waits[-1] >= 1:  # a busy computer does so once, a fault always
        assert len(waits) < TRIES, waits
        waited_s, took_s, answers = await held_up_s(cluster, path, content)
        waits.append(waited_s / max(longest_s, LONGEST_SHARE * took_s))
    statuses = {answer.status_code for answer in answers}
    assert statuses <= {200, 400, 404, 413}, [answer.text[:300] for answer in answers]
    assert all(answer.json().get("error", {"message": ""})["message"] < "~" for answer in answers)
    grown = cluster.routers()[0].memory_full_info().uss - before
    assert grown < HELD_BYTES + GROWTH * SENT_AT_ONCE * len(content)
