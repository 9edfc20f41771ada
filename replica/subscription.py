"""What an engine publishes over ZMQ, in order; batches that went missing are asked for again.

The publisher is vLLM's: its PUB socket sends (topic, number, payload), numbered from 0 on; its
ROUTER, told a number, sends the batches from there on that it still remembers, and then END.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

END = 2**64 - 1  # where a batch has its number
QUIET_S = 5.0  # without a batch; then it is asked whether there was one
ANSWER_S = 2.0  # the longest wait for each message of an answer
START_S = 30.0  # ... and for the first one


class Subscription:
    """The publisher connects to `endpoint` and binds `replay_endpoint`."""

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        # We bind and the engine connects: no port is guessed, and no early batch is missed.
        port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.folder = TemporaryDirectory(prefix="kvroute-events-")
        self.replay_endpoint = f"ipc://{Path(self.folder.name) / 'replay'}"
        self._replay = self._socket(zmq.DEALER)
        self._due = 0  # the number of the next batch

    async def connect(self) -> None:
        """Once the publisher is there. The connection stays and its address goes, so that nothing
        is left of it whoever is killed. TimeoutError when the publisher does not answer."""
        self._replay.connect(self.replay_endpoint)
        await self._ask(END)
        async with asyncio.timeout(START_S):
            await self._replay.recv_multipart()
        self.folder.cleanup()

    async def batches(self) -> AsyncGenerator[bytes | None, None]:
        """Payloads, each once; None where some are lost for good. For one reader."""
        while True:
            live = await _receive(self._live, QUIET_S)
            if live is None or live[0] > self._due:
                async for missed in self._missed():
                    for payload in self._in_order(*missed):
                        yield payload
            for payload in self._in_order(*live) if live else ():
                yield payload

    def close(self) -> None:
        self._context.destroy(linger=0)  # ours alone: the sockets go with it
        self.folder.cleanup()

    async def _missed(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """What the publisher remembers of the batch that is due and those after it."""
        await self._ask(self._due)
        while (answer := await _receive(self._replay, ANSWER_S)) and answer[0] != END:
            yield answer

    def _in_order(self, number: int, payload: bytes) -> Iterator[bytes | None]:
        if number < self._due:
            return  # it came before
        if number > self._due:
            yield None
        self._due = number + 1
        yield payload

    async def _ask(self, number: int) -> None:
        await self._replay.send_multipart([b"", number.to_bytes(8, "big")])

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)  # what waits for us is bounded by what the publisher keeps
        return socket


async def _receive(socket: zmq.asyncio.Socket, wait_s: float) -> tuple[int, bytes] | None:
    """A batch and its number, or None when none came in time."""
    try:
        async with asyncio.timeout(wait_s):
            *_, number, payload = await socket.recv_multipart()
    except TimeoutError:
        return None
    return int.from_bytes(number, "big"), payload
