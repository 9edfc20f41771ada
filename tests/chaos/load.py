"""Clients that read streams with known answers, and the counts of their results."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import httpx

from kvroute.process.builtin_model import BUILTIN_MODEL

TOKENS = 60  # number of tokens of an answer
PAUSE_S = 0.2  # seconds that a client waits after a failure
GAP_S = 1.0  # seconds between two tokens from which a gap counts as a disturbance


@dataclass
class Count:
    """The results of the answers in one period."""

    answered: int = 0
    different: int = 0
    broken: int = 0  # number of answers that failed after their first token
    refused: int = 0  # number of requests that failed before their first token
    longest_gap_s: float = 0.0
    disturbed_at_s: float = 0.0  # monotonic time of the last disturbance; 0: there was none

    def disturb(self) -> None:
        self.disturbed_at_s = time.monotonic()


class Load:
    """Clients that send the same requests again and again, without retries."""

    def __init__(self, url: str, streams: int) -> None:
        self.count = Count()
        self._url = url
        self._streams = streams
        self._expected: dict[int, str] = {}
        self._over = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Get each answer once before the context begins; then send requests until it ends."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        async with (
            httpx.AsyncClient(base_url=self._url, timeout=90, limits=limits) as client,
            asyncio.TaskGroup() as tasks,
        ):
            texts = await asyncio.gather(
                *(self._read_answer(client, n) for n in range(self._streams))
            )
            self._expected = dict(enumerate(texts))
            for number in range(self._streams):
                tasks.create_task(self._send_repeatedly(client, number))
            try:
                yield
            finally:
                self._over.set()

    async def _send_repeatedly(self, client: httpx.AsyncClient, number: int) -> None:
        while not self._over.is_set():
            received: list[str] = []
            try:
                text = await self._read_answer(client, number, received)
            except (httpx.HTTPError, ValueError):
                self.count.broken += bool(received)
                self.count.refused += not received
                self.count.disturb()
                await asyncio.sleep(PAUSE_S)
                continue
            self.count.answered += 1
            if text != self._expected[number]:
                self.count.different += 1
                self.count.disturb()

    async def _read_answer(
        self, client: httpx.AsyncClient, number: int, received: list[str] | None = None
    ) -> str:
        """Return an answer, and append its pieces to `received` as they arrive.

        Raises:
            HTTPError: The request failed.
            ValueError: The stream contains an error, or ended early.
        """
        body = {
            "model": BUILTIN_MODEL,
            "prompt": f"Question {number} of many. " * 20,
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        pieces, last_s = received if received is not None else [], time.monotonic()
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
    """Return the text of an event. Raises ValueError if the event is an error."""
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        raise ValueError(event["error"]["message"])
    return str(event["choices"][0]["text"])
