"""A publisher of KV cache events, as a vLLM server has one."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from kvroute.local.ports import free_port
from kvroute.replica.engine.event_batches import END_OF_REPLAY


class Publisher:
    """vLLM's publisher: it numbers its batches, and keeps the last `kept` of them for replays."""

    def __init__(self, ports: tuple[int, int], *, name: str = "a", kept: int = 100) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.PUB)
        self._live.bind(f"tcp://127.0.0.1:{ports[0]}")
        self._replay = self._context.socket(zmq.ROUTER)
        self._replay.bind(f"tcp://127.0.0.1:{ports[1]}")
        self._name, self._kept = name, kept
        self.batches: list[bytes] = []

    async def publish(self, count: int, *, is_lost: bool = False) -> None:
        """Publish further batches; a lost one can only be replayed."""
        for _ in range(count):
            await self.send(is_lost=is_lost)

    async def send(self, *events: Any, is_lost: bool = False) -> None:
        """Publish a batch with these events."""
        await self.send_raw(
            msgspec.msgpack.encode([float(len(self.batches)), events, self._name]), is_lost=is_lost
        )

    async def send_raw(self, batch: bytes, *, is_lost: bool = False) -> None:
        """Publish a batch that may be no batch."""
        number = len(self.batches)
        self.batches.append(batch)
        if not is_lost:
            await self._live.send_multipart([b"", number.to_bytes(8, "big"), batch])

    async def serve(self) -> None:
        """Answer requests for a replay until cancelled."""
        while True:
            client, _, start = await self._replay.recv_multipart()
            first = max(int.from_bytes(start, "big"), len(self.batches) - self._kept)
            for number in range(first, len(self.batches)):
                parts = (client, b"", b"", number.to_bytes(8, "big"), self.batches[number])
                await self._replay.send_multipart(parts)
            await self._replay.send_multipart(
                [client, b"", b"", END_OF_REPLAY.to_bytes(8, "big"), b""]
            )

    def close(self) -> None:
        self._context.destroy(linger=0)


@asynccontextmanager
async def publishing(
    ports: tuple[int, int], *, name: str = "a", kept: int = 100
) -> AsyncIterator[Publisher]:
    publisher = Publisher(ports, name=name, kept=kept)
    task = asyncio.create_task(publisher.serve())
    try:
        yield publisher
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        publisher.close()


def two_ports() -> tuple[int, int]:
    return free_port(), free_port()
