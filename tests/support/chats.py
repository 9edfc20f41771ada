"""Chats that go on and on, and what each turn found in a cache."""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from openai import APIError, AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.workloads import BLOCK, WORDS

TURNS = 8  # then a new chat begins
TURN_WORDS = 150
THINK_S = 0.3


@dataclass(frozen=True)
class Turn:
    at_s: float  # when it was sent, on the monotonic clock
    ttft_s: float
    reusable_tokens: int  # of full blocks in what the chat had sent before
    cached_tokens: int


class Chats:
    """`count` of them at any time; each turn waits for the answer to the one before."""

    def __init__(self, client: AsyncOpenAI, count: int, *, think_s: float = THINK_S) -> None:
        self.turns: list[Turn] = []
        self.failures: list[Exception] = []
        self._client = client
        self._count = count
        self._think_s = think_s
        self._goes_on = True

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Until the block ends, and all are answered."""
        async with asyncio.TaskGroup() as group:
            for seed in range(self._count):
                group.create_task(self._chat(random.Random(seed)))
            yield
            self._goes_on = False

    async def _chat(self, rng: random.Random) -> None:
        while self._goes_on:
            messages: list[dict[str, str]] = []
            sent_tokens = 0
            for _ in range(TURNS):
                text = " ".join(rng.choices(WORDS, k=TURN_WORDS))
                messages.append({"role": "user", "content": f"{rng.random()} {text}"})
                try:
                    answer, sent_tokens = await self._turn(messages, sent_tokens)
                except (APIError, httpx.HTTPError) as error:  # the latter in the midst of an answer
                    self.failures.append(error)
                    break
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(rng.uniform(0.5, 1.5) * self._think_s)
                if not self._goes_on:
                    return

    async def _turn(self, messages: list[Any], sent_tokens: int) -> tuple[str, int]:
        """The answer, and the tokens in the prompt."""
        begun_s = time.monotonic()
        stream = await self._client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=messages,
            max_tokens=16,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        answer, ttft_s = "", None
        async for event in stream:
            ttft_s = ttft_s or time.monotonic() - begun_s
            answer += "".join(choice.delta.content or "" for choice in event.choices)
        assert event.usage is not None
        assert event.usage.prompt_tokens_details is not None
        assert ttft_s is not None
        reusable = sent_tokens // BLOCK * BLOCK
        cached = event.usage.prompt_tokens_details.cached_tokens or 0
        self.turns.append(Turn(begun_s, ttft_s, reusable, min(cached, reusable)))
        return answer, event.usage.prompt_tokens


def hit_share(turns: Sequence[Turn]) -> float:
    """Of what the chats had sent before."""
    return sum(t.cached_tokens for t in turns) / sum(t.reusable_tokens for t in turns)


def median_ttft_s(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.ttft_s for turn in turns)
