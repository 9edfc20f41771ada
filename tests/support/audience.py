"""Clients that listen while something happens to the cluster."""

import asyncio
import time
from dataclasses import dataclass

from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL

CLIENTS = 50


@dataclass(frozen=True)
class Heard:
    """What one client got."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class Audience:
    """Clients that stream all at once, each an answer of its own of so many tokens."""

    def __init__(
        self, client: AsyncOpenAI, words: int, *, clients: int = CLIENTS, tokens: int = 60
    ) -> None:
        self.pieces = [0] * clients  # heard so far
        self.replicas = [""] * clients  # that began the answers
        self.longest_pause_s = 0.0  # that any of them heard nothing
        self._client = client
        self._numbers = range(clients)
        self._words = words
        self._tokens = tokens

    async def listen(self) -> list[Heard]:
        return await asyncio.gather(*map(self._listen, self._numbers))

    async def listen_to_what_comes(self) -> list[Heard | BaseException]:
        """The same, with an error for each answer that breaks."""
        listening = map(self._listen, self._numbers)
        return await asyncio.gather(*listening, return_exceptions=True)

    async def listen_until(self, over: asyncio.Event) -> list[list[Heard]]:
        """Each client asks for the same answer again and again, and hears the last one out."""

        async def listen(number: int) -> list[Heard]:
            heard = []
            while not over.is_set():
                heard.append(await self._listen(number))
            return heard

        return await asyncio.gather(*map(listen, self._numbers))

    async def _listen(self, number: int) -> Heard:
        last_s = time.monotonic()
        stream = await self._client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=[{"role": "user", "content": f"{number} {'word ' * self._words}"}],
            max_tokens=self._tokens,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        self.replicas[number] = stream.response.headers["x-kvroute-replica"]
        text, reason = "", None
        async for event in stream:
            now_s = time.monotonic()
            self.longest_pause_s = max(self.longest_pause_s, now_s - last_s)
            last_s = now_s
            for choice in event.choices:
                text += choice.delta.content or ""
                reason = choice.finish_reason
                self.pieces[number] += bool(choice.delta.content)
        assert event.usage is not None
        return Heard(text, reason, event.usage.prompt_tokens, event.usage.completion_tokens)
