"""Receives vLLM's KV events over ZMQ in order, and requests lost batches again.

vLLM's PUB socket sends (topic, number, payload), with numbers from 0 on. Its ROUTER socket receives
a number. It then sends all batches from that number on that it still has, followed by END.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

END = 2**64 - 1  # replaces the batch number in the message that ends a replay
QUIET_S = 5.0  # seconds without a batch after which the next batches are requested again
ANSWER_S = 2.0  # timeout in seconds for each message of a replay
START_S = 30.0  # timeout in seconds for the first message at the engine's start


class Subscription:
    """The receiver of one publisher, which connects to `endpoint` and binds `replay_endpoint`."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        # This side binds and the engine connects. So no port has to be guessed, and batches that
        # the engine sends early are not lost.
        port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.folder = TemporaryDirectory(prefix="kvroute-events-")
        self.replay_endpoint = f"ipc://{Path(self.folder.name) / 'replay'}"
        self._replay = self._socket(zmq.DEALER)
        self._due = 0  # the number of the next batch

    async def connect(self, *, has_publisher: bool = True) -> None:
        """Connect to the running publisher, then delete the socket's file.

        The file is deleted so that it does not remain when a process is killed.

        Raises:
            TimeoutError: The publisher does not respond.
        """
        if has_publisher:
            self._replay.connect(self.replay_endpoint)
            await self._request(END)
            async with asyncio.timeout(START_S):
                await self._replay.recv_multipart()
        self.folder.cleanup()

    async def batches(self) -> AsyncGenerator[bytes | None, None]:
        """Yield each payload once, and None where payloads are lost for good. For one reader."""
        while True:
            live = await _receive(self._live, QUIET_S)
            if live is None or live[0] > self._due:
                async for missed in self._missed():
                    for payload in self._in_order(*missed):
                        yield payload
            for payload in self._in_order(*live) if live else ():
                yield payload

    def close(self) -> None:
        self._context.destroy(linger=0)  # also closes the sockets
        self.folder.cleanup()

    async def _missed(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the next batch and later ones, as far as the publisher still has them."""
        await self._request(self._due)
        while (answer := await _receive(self._replay, ANSWER_S)) and answer[0] != END:
            yield answer

    def _in_order(self, number: int, payload: bytes) -> Iterator[bytes | None]:
        if number < self._due:
            return  # a duplicate
        if number > self._due:
            yield None
        self._due = number + 1
        yield payload

    async def _request(self, number: int) -> None:
        await self._replay.send_multipart([b"", number.to_bytes(8, "big")])

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)  # no limit: the publisher's own buffer is the bound
        return socket


async def _receive(socket: zmq.asyncio.Socket, wait_s: float) -> tuple[int, bytes] | None:
    """Return a batch and its number, or None if none arrived in time."""
    try:
        async with asyncio.timeout(wait_s):
            *_, number, payload = await socket.recv_multipart()
    except TimeoutError:
        return None
    return int.from_bytes(number, "big"), payload
