"""Receives batches of vLLM's KV events over ZMQ in order, and requests lost batches again."""

import asyncio
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import zmq
import zmq.asyncio

from kvroute.replica.engine.event_batches import (
    END_OF_REPLAY,
    REPLAY_TIMEOUT_S,
    receive_batch,
    request_replay,
)

# Seconds without a batch after which a replay is requested. A lost batch is noticed when the next
# batch arrives. Without a next batch, only the replay shows it.
QUIET_S = 5.0
CONNECT_TIMEOUT_S = 30.0  # timeout for the first message of a new publisher, in seconds


class Subscription:
    """The receiver of one publisher's events.

    The publisher connects to `endpoint` and binds `replay_endpoint`.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._socket(zmq.SUB)
        self._live.setsockopt(zmq.SUBSCRIBE, b"")
        # The replica binds this socket and the engine connects to it. So no free port has to be
        # guessed, and batches that the engine sends early are not lost.
        port = self._live.bind_to_random_port("tcp://127.0.0.1")
        self.endpoint = f"tcp://127.0.0.1:{port}"
        self.folder = TemporaryDirectory(prefix="kvroute-events-")
        self.replay_endpoint = f"ipc://{Path(self.folder.name) / 'replay'}"
        self._replay = self._socket(zmq.DEALER)
        self._next_number = 0  # number of the next batch

    async def connect(self, *, has_publisher: bool = True) -> None:
        """Connect to the running publisher, then delete the file of the replay socket.

        An open connection does not need the file. If the process were killed later, the file would
        remain.

        Args:
            has_publisher: Whether vLLM publishes events. It does not if prefix caching is off.

        Raises:
            TimeoutError: The publisher does not respond.
        """
        if has_publisher:
            self._replay.connect(self.replay_endpoint)
            await request_replay(self._replay, END_OF_REPLAY)
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                await self._replay.recv_multipart()
        self.folder.cleanup()

    async def batches(self) -> AsyncGenerator[bytes | None, None]:
        """Yield each payload once, in order, and None in place of payloads that are lost for good.

        There must be only one reader.
        """
        while True:
            live = await receive_batch(self._live, QUIET_S)
            if live is None or live[0] > self._next_number:
                async for batch in self._replayed():
                    for payload in self._in_order(*batch):
                        yield payload
            for payload in self._in_order(*live) if live else ():
                yield payload

    def close(self) -> None:
        self._context.destroy(linger=0)  # also closes the sockets
        self.folder.cleanup()

    async def _replayed(self) -> AsyncGenerator[tuple[int, bytes], None]:
        """Request and yield the next batch and all later batches that the publisher still has."""
        await request_replay(self._replay, self._next_number)
        while (batch := await receive_batch(self._replay, REPLAY_TIMEOUT_S)) and (
            batch[0] != END_OF_REPLAY
        ):
            yield batch

    def _in_order(self, number: int, payload: bytes) -> Iterator[bytes | None]:
        """Yield the payload of a batch unless it is a duplicate.

        If batches before it were lost, yield None first.
        """
        if number < self._next_number:
            return
        if number > self._next_number:
            yield None
        self._next_number = number + 1
        yield payload

    def _socket(self, kind: int) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.RCVHWM, 0)  # no limit here: the publisher's own buffer is limited
        return socket
