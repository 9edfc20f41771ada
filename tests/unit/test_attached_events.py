"""Events of a server arrive once and in order, through losses, restarts and a late start."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.replica.attached_engine.server_cache.event_source import EventSource
from tests.support.kv_publisher import publishing, two_ports


class Reader:
    """Everything that a source has yielded since it last said to forget all."""

    def __init__(self, ports: tuple[int, int]) -> None:
        self.source = EventSource(*(f"tcp://127.0.0.1:{port}" for port in ports))
        self.received: list[bytes] = []
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for payload in self.source.updates():
            if payload is None:
                self.received.clear()
            else:
                self.received.append(payload)

    async def wait_for(self, expected: list[bytes]) -> None:
        async with asyncio.timeout(60):
            while self.received != expected:
                await asyncio.sleep(0.01)
            await self.source.caught_up()

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self.source.close()


@asynccontextmanager
async def reading(ports: tuple[int, int]) -> AsyncIterator[Reader]:
    reader = Reader(ports)
    try:
        yield reader
    finally:
        await reader.close()


async def test_batches_from_before_the_start_are_replayed() -> None:
    ports = two_ports()
    async with publishing(ports) as server:
        await server.publish(5)
        async with reading(ports) as reader:
            await reader.wait_for(server.batches)
            await server.publish(5)
            await reader.wait_for(server.batches)
            assert reader.source.is_complete


async def test_a_late_start_behind_the_buffer_is_known_to_be_incomplete() -> None:
    ports = two_ports()
    async with publishing(ports, kept=3) as server:
        await server.publish(5)
        async with reading(ports) as reader:
            await reader.wait_for(server.batches[2:])
            assert not reader.source.is_complete


async def test_lost_batches_are_requested_again() -> None:
    ports = two_ports()
    async with publishing(ports) as server, reading(ports) as reader:
        await server.publish(3)
        await reader.wait_for(server.batches)
        await server.publish(2, is_lost=True)
        await server.publish(1)
        await reader.wait_for(server.batches)
        assert not reader.source.restarts


async def test_a_last_batch_that_was_lost_is_found_while_nothing_else_comes() -> None:
    ports = two_ports()
    async with publishing(ports) as server, reading(ports) as reader:
        await server.publish(1, is_lost=True)
        await reader.wait_for(server.batches)


async def test_after_a_gap_longer_than_the_buffer_everything_is_read_again() -> None:
    ports = two_ports()
    async with publishing(ports, kept=3) as server, reading(ports) as reader:
        await server.publish(2)
        await reader.wait_for(server.batches)
        await server.publish(6, is_lost=True)
        await server.publish(1)
        await reader.wait_for(server.batches[-3:])
        assert reader.source.restarts == {"gap": 1}


async def test_a_new_process_is_noticed_though_it_has_sent_more_batches() -> None:
    ports = two_ports()
    async with reading(ports) as reader:
        async with publishing(ports) as before:
            await before.publish(3)
            await reader.wait_for(before.batches)
        async with publishing(ports, name="b") as after:
            await after.publish(8)
            await reader.wait_for(after.batches)
            assert reader.source.restarts == {"new process": 1}


async def test_a_new_process_without_batches_is_noticed() -> None:
    ports = two_ports()
    async with reading(ports) as reader:
        async with publishing(ports) as before:
            await before.publish(3)
            await reader.wait_for(before.batches)
        async with publishing(ports, name="b"):
            await reader.wait_for([])
