"""Receives the KV cache events of one rank of a running vLLM server, over ZMQ.

One rule covers lost batches, reconnections, restarts of the server and a late start of this
process: ask for the last batch that was received, and for everything after it. A batch contains the
time of its creation, so two processes never send equal batches. If the server answers with exactly
the same batch, the server is still the same process, and nothing is missing. If not, this module
forgets all batches, and reads them again from the server's oldest batch. Comparing numbers alone
would miss a new process that has sent more batches than the old one.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator

import msgspec
import zmq
import zmq.asyncio
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.replica.engine.event_batches import (
    END_OF_REPLAY,
    REPLAY_TIMEOUT_S,
    receive_batch,
    request_replay,
)

IDLE_S = 0.5  # seconds without a batch after which the last batch is requested again
MAX_WAITING = 100_000  # live batches that wait to be read; the server drops further ones


class _Head(Struct, array_like=True, gc=False):
    ts: float  # Unix time of the batch, in seconds


_decode_head = msgspec.msgpack.Decoder(_Head).decode


class EventSource:
    """The receiver for one rank. Only one task may iterate over `updates`."""

    def __init__(self, endpoint: str, replay_endpoint: str, *, topic: str = "") -> None:
        self._context = zmq.asyncio.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, MAX_WAITING)
        self._live.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._live.setsockopt(zmq.RECONNECT_IVL, 100)
        self._live.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        self._live.connect(endpoint)
        self._replay_endpoint = replay_endpoint
        # Set while no batch is known to be missing. Otherwise, the receiver requests the last batch
        # and all later ones again, and then sets the event.
        self._is_following = asyncio.Event()
        # True: all batches since the server's start have been received.
        self.is_complete = True
        self.restarts = Counter[str]()  # how often everything was read again, by reason
        self._forget()

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)

    def compare(self) -> None:
        """Make `updates` request the last batch again before it yields the next batch."""
        self._is_following.clear()

    async def caught_up(self) -> None:
        """Wait until no batch is missing."""
        await self._is_following.wait()

    async def updates(self) -> AsyncGenerator[bytes | None, None]:
        """Yield each batch once, in order.

        None tells the reader to forget all earlier batches, because batches may be missing here.
        """
        while True:
            live = await receive_batch(self._live, IDLE_S) if self._is_following.is_set() else None
            if live is not None and self._is_next(*live):
                yield self._take(*live)
            elif live is None or self._is_unexpected(*live):
                self._is_following.clear()
                while not self._is_following.is_set():
                    async for payload in self._catch_up():
                        yield payload

    def _is_next(self, number: int, payload: bytes) -> bool:
        return self._is_following.is_set() and number == self._last + 1

    def _is_unexpected(self, number: int, payload: bytes) -> bool:
        """Return whether batches before this one are missing, or a new process has sent it."""
        return (
            not self._is_following.is_set()
            or number > self._last
            or _time_of(payload) > self._last_ts
        )

    def _take(self, number: int, payload: bytes) -> bytes:
        self._last, self._last_ts = number, _time_of(payload)
        self._last_digest = xxh3_64_intdigest(payload)
        return payload

    def _forget(self) -> None:
        self._last = -1  # number of the last batch
        self._last_ts = 0.0
        self._last_digest = 0
        self.is_complete = True

    async def _catch_up(self) -> AsyncGenerator[bytes | None, None]:
        """Request the last batch and yield all later ones, or None if everything is forgotten.

        If nothing is missing at the end, this sets `_is_following`. Otherwise, call this again.
        """
        start, is_same = max(0, self._last), self._last < 0
        try:
            async for number, payload in self._replay(start):
                if not is_same:
                    if number != start or xxh3_64_intdigest(payload) != self._last_digest:
                        self._restart("gap" if number > start else "new process")
                        yield None
                        return
                    is_same = True
                elif self._last >= 0 and number > self._last + 1:
                    return  # the server dropped a part of a long answer; continue from here
                else:
                    self.is_complete &= self._last >= 0 or number == 0
                    yield self._take(number, payload)
        except TimeoutError:
            return
        if is_same:
            self._is_following.set()
        else:
            self._restart("new process")  # the server does not have the last batch
            yield None

    def _restart(self, reason: str) -> None:
        self.restarts[reason] += 1
        self._forget()

    async def _replay(self, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield the server's batches from `start` on. Raises TimeoutError if it does not answer.

        A long answer may have gaps: the server drops messages that do not fit its own queue.
        """
        with self._context.socket(zmq.DEALER) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.RCVHWM, 0)  # no limit: the server's buffer limits the answer
            socket.connect(self._replay_endpoint)
            await request_replay(socket, start)
            while (answer := await receive_batch(socket, REPLAY_TIMEOUT_S)) is not None:
                if answer[0] == END_OF_REPLAY:
                    return
                yield answer
        raise TimeoutError


def _time_of(payload: bytes) -> float:
    """Return the time of a batch; 0 if the batch cannot be read."""
    try:
        return _decode_head(payload).ts
    except DECODE_ERRORS:
        return 0.0
