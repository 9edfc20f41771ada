"""Streams of every kind that can be cut anywhere and go on elsewhere."""

import asyncio
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.bodies import (
    ASK,
    CHATS,
    CONTINUED,
    MANY_OUTPUTS,
    OTHERS,
    Body,
    comparable,
    joined_events,
)
from tests.support.clients import async_openai_client
from tests.support.serving import Cluster
from tests.support.waiting import until

SERIES = (" a b c d e f g", " 1 2 3 4 5 6 7 8", " A B C D E F", " 9 8 7 6 5 4 3 2 1")
RECITED = 40  # tokens
# Path and body of what agents ask.
AGENTS = [
    *((CHATS, {"messages": ASK, "max_tokens": 24, **own}) for own in CONTINUED.values()),
    *OTHERS.items(),
    MANY_OUTPUTS["two tools"],
]


class Recital:
    """All of them at once. pieces: the replica that made each of the recited ones."""

    def __init__(self, cluster: Cluster) -> None:
        self.pieces: list[str] = []
        self._cluster = cluster

    async def heard(self) -> list[object]:
        """What they say, without what is drawn and dated."""
        async with async_openai_client(self._cluster.url, timeout_s=120) as client:
            recited = (self._recite(client, series) for series in SERIES)
            called = (self._agents_call(*call) for call in AGENTS)
            return await asyncio.gather(*recited, *called)

    async def is_going_on(self) -> None:
        """Returns once all recite."""
        await until(lambda: len(self.pieces) >= 5 * len(SERIES))

    async def _recite(self, client: AsyncOpenAI, series: str) -> tuple[str, int]:
        """A text whose next word is never in doubt, and how many tokens it took."""
        stream = await client.completions.create(
            model=BUILTIN_MODEL,
            prompt=series * 30,
            max_tokens=RECITED,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text = ""
        async for event in stream:
            for choice in event.choices:
                text += choice.text
                self.pieces.append(stream.response.headers["x-kvroute-replica"])
        assert event.usage is not None
        return text, event.usage.completion_tokens

    async def _agents_call(self, path: str, own: Body) -> str:
        """Its pieces of text joined."""
        body = {"model": BUILTIN_MODEL, "temperature": 0, "stream": True, **own}
        async with httpx.AsyncClient(base_url=self._cluster.url, timeout=120) as client:
            answer = await client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return joined_events(comparable(answer.content))


def replicas(cluster: Cluster) -> dict[str, Any]:
    """By id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: replica for replica in listed}


def engine_of(replica: psutil.Process) -> psutil.Process:
    """Of the processes that it has started, the largest: that has the model."""
    return max(replica.children(recursive=True), key=lambda each: each.memory_info().rss)
