"""Clients that read streams while a test changes the cluster."""

import asyncio
import time
from dataclasses import dataclass

from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL

CLIENTS = 50


@dataclass(frozen=True)
class Received:
    """The answer that one client received."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int


class Audience:
    """Clients that read streams at the same time. Each client gets a different answer.

    Args:
        client: The client library's client, which all clients here share.
        words: The length of a prompt in words.
        clients: The number of clients.
        tokens: The maximum length of an answer in tokens.
    """

    def __init__(
        self, client: AsyncOpenAI, words: int, *, clients: int = CLIENTS, tokens: int = 60
    ) -> None:
        self.pieces = [0] * clients  # for each client, number of events received so far
        self.replicas = [""] * clients  # for each client, the replica that began its answer
        self.longest_pause_s = 0.0  # longest time without an event for any client
        self._client = client
        self._numbers = range(clients)
        self._words = words
        self._tokens = tokens

    async def listen(self) -> list[Received]:
        """Read one answer with each client; return the answers."""
        return await asyncio.gather(*map(self._listen, self._numbers))

    async def listen_despite_errors(self) -> list[Received | BaseException]:
        """Like `listen`, but return the error in place of each answer that fails."""
        listening = map(self._listen, self._numbers)
        return await asyncio.gather(*listening, return_exceptions=True)

    async def listen_until(self, over: asyncio.Event) -> list[list[Received]]:
        """Read the same answer again and again with each client, until `over` is set.

        The last answers are read to their ends.
        """

        async def listen(number: int) -> list[Received]:
            answers = []
            while not over.is_set():
                answers.append(await self._listen(number))
            return answers

        return await asyncio.gather(*map(listen, self._numbers))

    async def _listen(self, number: int) -> Received:
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
        return Received(text, reason, event.usage.prompt_tokens, event.usage.completion_tokens)
