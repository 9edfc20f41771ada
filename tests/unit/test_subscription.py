"""A subscriber gets every batch once and in order, also if messages are lost."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from kvroute.replica.engine.event_batches import END_OF_REPLAY
from kvroute.replica.vllm_engine.core.subscription import Subscription


class Publisher:
    """A publisher that numbers batches and keeps them, like vLLM's."""

    def __init__(self, subscription: Subscription) -> None:
        self.context = zmq.asyncio.Context()
        self.remembered: dict[int, bytes] = {}
        self._numbers = iter(range(1000))
        self._live = self.context.socket(zmq.PUB)
        self._live.connect(subscription.endpoint)
        self._replay = self.context.socket(zmq.ROUTER)
        self._replay.bind(subscription.replay_endpoint)
        self._task = asyncio.create_task(self._answer())

    async def publish(self, *, is_lost: bool = False) -> None:
        number = next(self._numbers)
        self.remembered[number] = f"batch {number}".encode()
        if not is_lost:
            await self._live.send_multipart([b"", number.to_bytes(8, "big"), self._last()])

    def _last(self) -> bytes:
        return self.remembered[max(self.remembered)]

    async def _answer(self) -> None:
        while True:
            peer, _, start = await self._replay.recv_multipart()
            asked = int.from_bytes(start, "big")
            replayed = {
                number: batch for number, batch in self.remembered.items() if number >= asked
            }
            for number, payload in {**replayed, END_OF_REPLAY: b""}.items():
                message = [peer, b"", b"", number.to_bytes(8, "big"), payload]
                await self._replay.send_multipart(message)

    def close(self) -> None:
        self._task.cancel()
        self.context.destroy(linger=0)


@pytest.fixture
async def pair() -> AsyncIterator[tuple[Publisher, Subscription]]:
    """Yield a connected pair; the first batch has been received."""
    subscription = Subscription()
    publisher = Publisher(subscription)
    await subscription.connect()
    while not await subscription._live.poll(10):  # its subscription takes a moment to arrive
        await publisher.publish()
    yield publisher, subscription
    publisher.close()
    subscription.close()


async def payloads_until(subscription: Subscription, last: int) -> list[bytes | None]:
    """Return the payloads up to that batch."""
    payloads: list[bytes | None] = []
    async with aclosing(subscription.batches()) as batches, asyncio.timeout(60):
        async for batch in batches:
            payloads.append(batch)
            if batch == f"batch {last}".encode():
                break
    return payloads


def all_of(publisher: Publisher) -> list[bytes | None]:
    return list(publisher.remembered.values())


Pair = tuple[Publisher, Subscription]


async def test_lost_batches_are_received_before_the_next_batch(pair: Pair) -> None:
    publisher, subscription = pair
    for is_lost in (False, True, True, False, True, False, False):
        await publisher.publish(is_lost=is_lost)
    assert await payloads_until(subscription, max(publisher.remembered)) == all_of(publisher)


async def test_a_lost_batch_is_received_even_if_no_batch_follows(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.replica.vllm_engine.core.subscription.QUIET_S", 0.05)
    publisher, subscription = pair
    await publisher.publish(is_lost=True)
    assert await payloads_until(subscription, max(publisher.remembered)) == all_of(publisher)


async def test_batches_that_the_publisher_no_longer_has_are_reported_as_lost(pair: Pair) -> None:
    publisher, subscription = pair
    last = max(publisher.remembered)
    await payloads_until(subscription, last)
    for is_lost in (True, True, False):
        await publisher.publish(is_lost=is_lost)
    del publisher.remembered[last + 1]
    expected = [None, f"batch {last + 2}".encode(), f"batch {last + 3}".encode()]
    assert await payloads_until(subscription, last + 3) == expected


async def test_a_publisher_that_does_not_answer_is_not_waited_for(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.replica.vllm_engine.core.subscription.REPLAY_TIMEOUT_S", 0.05)
    publisher, subscription = pair
    publisher._task.cancel()
    await publisher.publish(is_lost=True)
    await publisher.publish()
    assert None in await payloads_until(subscription, max(publisher.remembered))


async def test_no_file_of_the_address_remains_after_the_connection(pair: Pair) -> None:
    _, subscription = pair
    assert not Path(subscription.replay_endpoint.removeprefix("ipc://")).parent.exists()
