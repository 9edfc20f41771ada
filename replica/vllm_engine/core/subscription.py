"""vLLM's KV events arrive over ZMQ in order; lost batches are requested again.

vLLM's PUB socket sends (topic, number, payload), numbered from 0. Its ROUTER socket receives a
number, then sends the batches from that number on that it still has, and then END.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

END = 2**64 - 1  # instead of a batch's number
QUIET_S = 5.0  # after this time without a batch, missing ones are requested
ANSWER_S = 2.0  # the timeout for each replayed message
START_S = 30.0  # ... and for the first one


class Subscription:
    """The publisher connects to `endpoint` and binds `replay_endpoint`."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        # This side binds and the engine connects: no port is guessed, no early batch is lost.
        port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.folder = TemporaryDirectory(prefix="kvroute-events-")
        self.replay_endpoint = f"ipc://{Path(self.folder.name) / 'replay'}"
        self._replay = self._socket(zmq.DEALER)
        self._due = 0  # the number of the next batch

    async def connect(self, *, has_publisher: bool = True) -> None:
        """Connects to the running publisher, then deletes the socket's file, so that no file stays
        when a process is killed. Raises TimeoutError when the publisher does not respond."""
        if has_publisher:
            self._replay.connect(self.replay_endpoint)
            await self._request(END)
            async with asyncio.timeout(START_S):
                await self._replay.recv_multipart()
        self.folder.cleanup()

    async def batches(self) -> AsyncGenerator[bytes | None, None]:
        """Payloads, each once; None where some are finally lost. For one reader."""
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
        """The due batch and later ones, as far as the publisher still has them."""
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
    """A batch and its number, or None when none came in time."""
    try:
        async with asyncio.timeout(wait_s):
            *_, number, payload = await socket.recv_multipart()
    except TimeoutError:
        return None
    return int.from_bytes(number, "big"), payload
