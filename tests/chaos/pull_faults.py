"""Faults of replicas while others pull blocks from their host memory."""

import asyncio
import itertools
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import httpx

from tests.chaos.victim import Fault, Victim
from tests.support.scraping import total
from tests.support.waiting import until

BLOCK = 32  # tokens
PREFIX = 100 * BLOCK  # tokens that all prompts of a burst share
OWN = 40 * BLOCK  # tokens of each prompt after them
BURST = 16  # requests at once, so that all replicas are needed
PULLS = "kvroute_pulls_total{complete}"

numbers = itertools.count(1000)


def during_pulls(number: signal.Signals) -> Fault:
    """Return the fault that a replica gets a signal while others pull.

    The end of the context fails if an answer is broken, or differs when it is asked for again.
    """

    @asynccontextmanager
    async def fault(victim: Victim) -> AsyncIterator[None]:
        is_over = asyncio.Event()
        bursts = asyncio.create_task(_bursts(victim.url, is_over))
        before = _pulls(victim)
        await until(lambda: bursts.done() or _pulls(victim) > before)
        victim.any_of("kvroute:Replica").send_signal(number)
        yield
        is_over.set()
        await bursts

    return fault


def _pulls(victim: Victim) -> float:
    return total(victim.wired.cluster, "router")[PULLS]


async def _bursts(url: str, is_over: asyncio.Event) -> None:
    """Send bursts of prompts that share a new prefix, and send each burst once more."""
    async with httpx.AsyncClient(base_url=url, timeout=90) as client:
        while not is_over.is_set():
            prefix = [next(numbers)] * PREFIX
            await _text(client, prefix)  # the replica that computes it is the peer of the others
            prompts = [prefix + [next(numbers)] * OWN for _ in range(BURST)]
            assert await _texts(client, prompts) == await _texts(client, prompts)


async def _texts(client: httpx.AsyncClient, prompts: Sequence[list[int]]) -> list[str]:
    return await asyncio.gather(*(_text(client, prompt) for prompt in prompts))


async def _text(client: httpx.AsyncClient, prompt: list[int]) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["text"])


PULL_FAULTS: dict[str, Fault] = {
    "a replica is killed during pulls": during_pulls(signal.SIGKILL),
    "a replica is stopped during pulls": during_pulls(signal.SIGSTOP),
}
