"""Streams whose answers are known, and what becomes of them."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from kvroute.process.builtin_model import BUILTIN_MODEL

TOKENS = 60
PAUSE_S = 0.2  # after a failure
GAP_S = 1.0  # a longer one between two tokens counts as a disturbance


@dataclass
class Count:
    """What became of the answers of some time."""

    answered: int = 0
    different: int = 0
    broken: int = 0  # after their first token
    refused: int = 0  # before it
    longest_gap_s: float = 0.0
    disturbed_at_s: float = 0.0  # the last time, on the monotonic clock; 0: never

    def disturb(self) -> None:
        self.disturbed_at_s = time.monotonic()


class Load:
    """Asks the same questions again and again, without retries."""

    def __init__(self, url: str, streams: int) -> None:
        self.count = Count()
        self._url = url
        self._streams = streams
        self._known: dict[int, str] = {}
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Each answer is first heard undisturbed."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=90, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            texts = await asyncio.gather(*(self._hear(client, n) for n in range(self._streams)))
            self._known = dict(enumerate(texts))
            for number in range(self._streams):
                tasks.create_task(self._ask_again_and_again(client, number))
            try:
                yield
            finally:
                self._over.set()

    async def _ask_again_and_again(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over.is_set():
            heard: list[str] = []
            try:
                text = await self._hear(client, number, heard)
            except (httpx.HTTPError, ValueError):
                self.count.broken += bool(heard)
                self.count.refused += not heard
                self.count.disturb()
                await asyncio.sleep(PAUSE_S)
                continue
            self.count.answered += 1
            if text != self._known[number]:
                self.count.different += 1
                self.count.disturb()

    async def _hear(
        self, client: httpx.AsyncClient, number: int, heard: list[str] | None = None
    ) -> str:
        """The whole answer; its pieces are added to `heard`. HTTPError, ValueError: it failed."""
        body = {
            "model": BUILTIN_MODEL,
            "prompt": f"Question {number} of many. " * 20,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        pieces, last_s = heard if heard is not None else [], time.monotonic()
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                gap_s, last_s = time.monotonic() - last_s, time.monotonic()
                self.count.longest_gap_s = max(self.count.longest_gap_s, gap_s)
                if gap_s > GAP_S:
                    self.count.disturb()
                if line == "data: [DONE]":
                    return "".join(pieces)
                if line.startswith("data: "):
                    pieces.append(_text(line))
        raise ValueError("the stream ended early")


def _text(line: str) -> str:
    """ValueError for an event that is an error."""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ValueError(event["error"]["message"])
    return str(event["choices"][0]["text"])
