"""Chats that continue until a test ends, and the cache hits of each turn."""

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

TURNS = 8  # number of turns of a chat; then a new chat begins
TURN_WORDS = 150  # number of words of a user's message
THINK_S = 0.3  # mean seconds between an answer and the next turn


@dataclass(frozen=True)
class Turn:
    """The measurements of one turn."""

    at_s: float  # monotonic time at which the turn was sent
    ttft_s: float  # time to first token
    reusable_tokens: int  # tokens in full blocks that the chat's earlier turns had sent
    cached_tokens: int


class Chats:
    """`count` chats at the same time. Each turn is sent after the answer to the turn before it."""

    def __init__(self, client: AsyncOpenAI, count: int, *, think_s: float = THINK_S) -> None:
        self.turns: list[Turn] = []
        self.failures: list[Exception] = []
        self._client = client
        self._count = count
        self._think_s = think_s
        self._goes_on = True

    @contextlib.asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """Run the chats until the context ends, then wait for the last answers."""
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
                except (APIError, httpx.HTTPError) as error:  # httpx.HTTPError: during an answer
                    self.failures.append(error)
                    break
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(rng.uniform(0.5, 1.5) * self._think_s)
                if not self._goes_on:
                    return

    async def _turn(self, messages: list[Any], sent_tokens: int) -> tuple[str, int]:
        """Send a turn; return the answer, and the number of tokens of the prompt."""
        sent_s = time.monotonic()
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
            ttft_s = ttft_s or time.monotonic() - sent_s
            answer += "".join(choice.delta.content or "" for choice in event.choices)
        assert event.usage is not None
        assert event.usage.prompt_tokens_details is not None
        assert ttft_s is not None
        reusable = sent_tokens // BLOCK * BLOCK
        cached = event.usage.prompt_tokens_details.cached_tokens or 0
        self.turns.append(Turn(sent_s, ttft_s, reusable, min(cached, reusable)))
        return answer, event.usage.prompt_tokens


def hit_share(turns: Sequence[Turn]) -> float:
    """Return the share of the reusable tokens that were cached."""
    return sum(turn.cached_tokens for turn in turns) / sum(turn.reusable_tokens for turn in turns)


def median_ttft_s(turns: Sequence[Turn]) -> float:
    return statistics.median(turn.ttft_s for turn in turns)
