"""What waits for a client that reads slowly is bounded."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.generation import Chunk, GenerateRequest, Sampling
from kvroute.replica.relay import LEAST_TOKENS, WAITING_TOKENS, SlowReaderError, bounded

ENDLESS = 1 << 30
STEP = 64  # tokens in a chunk


def request(max_tokens: int = ENDLESS, *, prompts: int = 1, **sampling: Any) -> GenerateRequest:
    prompt = np.zeros(1, np.uint32)
    return GenerateRequest("r", prompt, Sampling(max_tokens, **sampling), prompts=prompts)


class Engine:
    """Generates tokens, so many in a chunk."""

    def __init__(self, tokens: int = ENDLESS, *, step: int = 1) -> None:
        self.generated = 0
        self.has_ended = False
        self._tokens = tokens
        self._step = step

    async def generate(self) -> AsyncGenerator[Chunk]:
        try:
            for number in range(0, self._tokens, self._step):
                await asyncio.sleep(0)
                self.generated += self._step
                yield Chunk(0, "", tuple(range(number, number + self._step)), 0)
        finally:
            self.has_ended = True


@pytest.mark.parametrize(
    ("sampling", "prompts", "limit"),
    [
        ({}, 1, WAITING_TOKENS),
        ({"n": 128}, 1, WAITING_TOKENS),
        ({"logprobs": 20}, 1, WAITING_TOKENS // 22),
        ({}, 1000, LEAST_TOKENS),
    ],
)
async def test_a_client_that_reads_nothing_costs_no_more(
    sampling: dict[str, int], prompts: int, limit: int
) -> None:
    engine = Engine(step=STEP)
    async with aclosing(bounded(request(prompts=prompts, **sampling), engine.generate())) as chunks:
        await anext(chunks)
        while not engine.has_ended:
            await asyncio.sleep(0)
        assert limit < engine.generated <= limit + 2 * STEP
        with pytest.raises(SlowReaderError, match="has not read"):
            [chunk async for chunk in chunks]


@given(st.lists(st.integers(0, 3), max_size=50), st.integers(0, 50))
def test_who_reads_gets_every_chunk_in_order(pauses: list[int], tokens: int) -> None:
    async def read() -> list[int]:
        got: list[int] = []
        engine, reads = Engine(tokens), iter(pauses)
        async for chunk in bounded(request(), engine.generate()):
            got += chunk.token_ids
            for _ in range(next(reads, 0)):
                await asyncio.sleep(0)
        return got

    assert asyncio.run(read()) == list(range(tokens))


async def test_the_engines_error_reaches_who_reads() -> None:
    async def fail() -> AsyncGenerator[Chunk]:
        yield Chunk(0, "", (1,), 0)
        raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        [chunk async for chunk in bounded(request(), fail())]


async def test_a_client_that_leaves_ends_the_request() -> None:
    engine = Engine()
    async with aclosing(bounded(request(), engine.generate())) as chunks:
        await anext(chunks)
    assert engine.has_ended


async def test_a_short_answer_goes_straight_through() -> None:
    chunks = Engine().generate()
    assert bounded(request(WAITING_TOKENS), chunks) is chunks
    await chunks.aclose()
