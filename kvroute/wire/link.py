"""The router's end of a connection to a replica, and the streams of its requests."""

import asyncio
import secrets
import ssl
from collections import deque
from collections.abc import Callable, Sequence
from hashlib import sha256
from itertools import count

from kvroute.contract.generation import (
    Chunk,
    EngineDeadError,
    GenerateRequest,
    joined,
    weight,
)
from kvroute.wire import structs
from kvroute.wire.contexts import TlsEnd
from kvroute.wire.framed_connection import Connection, is_proof, proof
from kvroute.wire.framing import MessageKind
from kvroute.wire.in_process import IN_PROCESS, connect_here
from kvroute.wire.structs import NONCE_BYTES, VERSION, StreamEnded, encode
from kvroute.wire.tls import explained

SLICE = 32  # maximum number of chunks to deliver in one iteration of the event loop
# When this many chunks of a stream wait to be read, they are joined: thousands of small objects
# would make each garbage collection stop the router.
MAX_CHUNKS = 64
MAX_UNSENT = 64_000_000  # while more bytes wait to be sent to a replica, new requests are refused

# Receives a replica's report: for each rank, the number of prompt tokens still to compute.
OnPending = Callable[[Sequence[int]], object]


def ignore_pending(_: object) -> None:
    """Ignore a report of pending prompt tokens."""


class LostError(Exception):
    """The connection to the replica has ended."""


class RefusedError(Exception):
    """The replica cannot accept the request now; the message says why."""


class FailedError(Exception):
    """The replica failed to run the request."""


class SlowReaderError(ValueError):
    """The request was ended because its client reads too slowly."""


class Stream:
    """The chunks of one request's answer. The chunks between two reads are joined into one.

    Args:
        link: the connection on which the request was sent.
        number: the number of the stream on that connection.
        max_waiting: maximum weight() of all chunks that wait to be read, in tokens.
    """

    __slots__ = (
        "_chunks",
        "_end",
        "_link",
        "_max_waiting",
        "_number",
        "_waiter",
        "_waiting",
        "is_preparing",
        "suspects",
        "was_taken",
    )

    def __init__(self, link: "Link", number: int, max_waiting: int) -> None:
        self._link = link
        self._number = number
        self._max_waiting = max_waiting
        # Whether the replica prepares the request for its engine (contract/preparation.py).
        self.is_preparing = False
        self.was_taken = False  # whether the replica has begun with the request
        # How many requests the replica was preparing when it was lost. Any of them may have caused
        # the loss. 0 if this request was not one of them.
        self.suspects = 0
        self._chunks: list[Chunk] = []
        self._waiting = 0  # weight of _chunks
        self._end: Exception | None = None  # how the stream ends after _chunks; None: it is open
        self._waiter: asyncio.Future[None] | None = None

    async def next(self) -> Chunk | None:
        """Wait for chunks, and return all that have arrived as one chunk; None: the stream ended.

        Raises:
            LostError, EngineDeadError: another replica can continue the request.
            RefusedError: another replica may accept the request; only before the first chunk.
            ValueError: no replica can run the request.
            FailedError: the replica failed to run the request.
        """
        while not self._chunks:
            if self._end is not None:
                if isinstance(self._end, _StreamDone):
                    return None
                raise self._end
            self._waiter = self._link.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._waiting = 0
        chunks, self._chunks = self._chunks, []
        return joined(chunks)

    def cancel(self) -> None:
        """Cancel the request at the replica, unless it has ended."""
        if self._end is None:
            self._end = _StreamDone()
            self._link.cancel(self._number)

    def withdraw(self, error: Exception) -> bool:
        """Cancel the request at the replica, and let `next` raise this error.

        Returns:
            False, and does nothing, if a chunk has arrived or the stream has ended.
        """
        if self._chunks or self._end is not None:
            return False
        self._link.cancel(self._number)
        self.end(error)
        return True

    def push(self, chunk: Chunk) -> None:
        """Add a chunk. If too much waits to be read, cancel the request with SlowReaderError."""
        self.is_preparing = False
        self._chunks.append(chunk)
        if len(self._chunks) == MAX_CHUNKS:
            self._chunks = [joined(self._chunks)]
        self._waiting += weight(chunk)
        if self._waiting > self._max_waiting:
            self._chunks.clear()
            self._link.cancel(self._number)
            self.end(
                SlowReaderError(
                    f"the client has not read {self._waiting} tokens; read faster, "
                    "or request fewer prompts, choices or logprobs"
                )
            )
        self._wake()

    def end(self, error: Exception) -> None:
        """End the stream with this error, unless it has ended."""
        if self._end is None:
            self._end = error
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _StreamDone(Exception):  # noqa: N818  # the end of a stream, not an error
    pass


class Link(Connection):
    """The connection to one replica.

    The future `ready` completes when both ends have proven that they know the secret. It fails with
    LostError if the connection ends earlier.
    """

    def __init__(
        self, replica_id: str, secret: bytes, on_pending: OnPending = ignore_pending
    ) -> None:
        super().__init__()
        self.replica_id = replica_id
        self._on_pending = on_pending
        self.loop = asyncio.get_running_loop()
        self.away_reason = ""  # why the replica's engine can run no requests now; empty: it can
        self.ready: asyncio.Future[None] = self.loop.create_future()
        self.closed: asyncio.Future[None] = self.loop.create_future()
        self._secret = secret
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._certificate = b""  # digest of the replica's certificate; empty: there is no TLS
        self._numbers = count()
        self._streams: dict[int, Stream] = {}
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._undelivered: deque[tuple[int, Chunk] | StreamEnded] = deque()
        self._receive: dict[int, Callable[[bytes], None]] = {
            MessageKind.CHALLENGE: self._prove,
            MessageKind.WELCOME: self._welcome,
            MessageKind.DELTAS: self._deltas,
            MessageKind.REPLY: self._reply,
            MessageKind.PENDING: self._pending,
            MessageKind.TAKEN: self._taken,
            MessageKind.PREPARED: self._prepared,
            MessageKind.AWAY: self._away,
        }

    def __str__(self) -> str:
        return f"the connection to replica {self.replica_id}"

    @property
    def is_open(self) -> bool:
        """Return whether requests can be sent on this connection.

        The result is False as soon as the transport closes. `closed` is set later, in the next
        iteration of the event loop.
        """
        is_lost = self.closed.done() or self.transport is None
        return not is_lost and not self.transport.is_closing()  # type: ignore[union-attr]

    @property
    def streams(self) -> int:
        """Return the number of open streams and calls."""
        return len(self._streams) + len(self._calls)

    def open(self, request: GenerateRequest, *, max_waiting: int) -> Stream:
        """Send a request and return its stream.

        Raises:
            LostError: the connection is closed.
            RefusedError: too many bytes wait to be sent.
        """
        stream = Stream(self, next(self._numbers), max_waiting)
        self._send(MessageKind.BEGIN, structs.encode_begin(stream._number, request))
        self._streams[stream._number] = stream
        return stream

    @property
    def pending_calls(self) -> int:
        """Return the number of method calls that the replica has not answered yet."""
        return len(self._calls)

    async def call(self, method: str, body: bytes = b"", rank: int = 0) -> bytes:
        """Call a method of one rank and return its answer. Raises the errors of Stream.next."""
        number = next(self._numbers)
        answer: asyncio.Future[bytes] = self.loop.create_future()
        self._send(MessageKind.CALL, encode(structs.MethodCall(number, method, body, rank)))
        self._calls[number] = answer
        try:
            return await answer
        finally:
            self._calls.pop(number, None)
            if answer.cancelled():
                self.send(MessageKind.CANCEL, encode(structs.Cancel(number)))

    def cancel(self, number: int) -> None:
        if self._streams.pop(number, None):
            self.send(MessageKind.CANCEL, encode(structs.Cancel(number)))

    def lose(self, error: Exception) -> None:
        """End the connection, and all its streams and calls with this error."""
        preparing = [stream for stream in self._streams.values() if stream.is_preparing]
        for stream in preparing:
            stream.suspects = len(preparing)
        for stream in self._streams.values():
            stream.end(error)
        for answer in self._calls.values():
            if not answer.done():
                answer.set_exception(error)
        self._undelivered.clear()
        self._streams.clear()
        self._calls.clear()
        if not self.ready.done():
            self.ready.set_exception(error)
            self.ready.exception()  # mark it as retrieved, since there may be no waiter
        if self.transport is not None:
            self.transport.abort()
        if not self.closed.done():
            self.closed.set_result(None)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
        if tls and (certificate := tls.getpeercert(binary_form=True)):
            self._certificate = sha256(certificate).digest()

    def connection_lost(self, error: Exception | None) -> None:
        why = f": {explained(error, peer='replica')}" if error else ""
        if self._certificate and not self.ready.done():  # TLS reports such an end without a reason
            why += "; the replica has refused this router's certificate or proof, see its log"
        self.lose(LostError(f"the connection has ended{why}"))

    def received(self, kind: int, payload: bytes) -> None:
        if receive := self._receive.get(kind):
            receive(payload)

    def _send(self, kind: MessageKind, payload: bytes) -> None:
        """Send a request or call. Raises LostError, or RefusedError if too many bytes wait."""
        if self.transport is None or not self.is_open:
            raise LostError("the connection is closed")
        if self.transport.get_write_buffer_size() > MAX_UNSENT:
            raise RefusedError(f"more than {MAX_UNSENT} bytes wait to be sent to the replica")
        self.send(kind, payload)

    def _prove(self, payload: bytes) -> None:
        challenge = structs.decode_challenge(payload)
        if challenge.version != VERSION:
            self.lose(
                LostError(
                    f"the replica's protocol version is {challenge.version}, and this router's is "
                    f"{VERSION}; run the same kvroute version everywhere"
                )
            )
            return
        own_proof = proof(self._secret, b"router", challenge.nonce, self._certificate)
        self.send(MessageKind.PROOF, encode(structs.Proof(VERSION, own_proof, self._nonce)))

    def _welcome(self, payload: bytes) -> None:
        received = structs.decode_welcome(payload).proof
        if not is_proof(received, self._secret, b"replica", self._nonce, self._certificate):
            self.lose(LostError("the process at this address does not know the replica's secret"))
        elif not self.ready.done():
            self.ready.set_result(None)

    def _deltas(self, payload: bytes) -> None:
        deltas = structs.decode_deltas(payload)
        is_first = not self._undelivered
        self._undelivered.extend(deltas.chunks)
        self._undelivered.extend(deltas.ended)
        if is_first:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver chunks to their requests, at most SLICE in one iteration of the event loop.

        One message can have the first tokens of hundreds of requests, and the router needs about
        1 ms to handle each first token. Between two slices, the event loop runs other tasks.
        """
        streams, undelivered = self._streams, self._undelivered
        for _ in range(SLICE):
            if not undelivered:
                return
            item = undelivered.popleft()
            if isinstance(item, StreamEnded):
                self._ended(item)
            elif stream := streams.get(item[0]):
                stream.push(item[1])
        if undelivered:
            self.loop.call_soon(self._deliver)

    def _ended(self, ended: StreamEnded) -> None:
        error = _error(ended)
        if stream := self._streams.pop(ended.stream, None):
            stream.end(error)
        elif (answer := self._calls.get(ended.stream)) and not answer.done():
            answer.set_exception(error)

    def _pending(self, payload: bytes) -> None:
        self._on_pending(structs.decode_pending(payload).tokens)

    def _taken(self, payload: bytes) -> None:
        if stream := self._streams.get(structs.decode_preparing(payload).stream):
            stream.is_preparing = stream.was_taken = True

    def _prepared(self, payload: bytes) -> None:
        if stream := self._streams.get(structs.decode_preparing(payload).stream):
            stream.is_preparing = False

    def _away(self, payload: bytes) -> None:
        self.away_reason = structs.decode_away(payload).reason

    def _reply(self, payload: bytes) -> None:
        reply = structs.decode_reply(payload)
        if (answer := self._calls.get(reply.stream)) and not answer.done():
            answer.set_result(reply.body)


async def connect(
    replica_id: str,
    host: str,
    port: int,
    secret: bytes,
    *,
    within_s: float,
    on_pending: OnPending = ignore_pending,
    tls: TlsEnd | None = None,
) -> Link:
    """Connect to a replica, and return the link once both ends have proven to know the secret.

    Args:
        replica_id: the replica's id.
        host: the replica's address; IN_PROCESS: the replica is in this process.
        port: the port on which it listens for routers.
        secret: the replica's secret.
        within_s: timeout in seconds.
        on_pending: called with each report of the replica's pending prompt tokens.
        tls: this router's certificate; None: the replica does not use TLS.

    Raises:
        LostError: the connection has failed, or was not ready within `within_s`.
    """
    link = Link(replica_id, secret, on_pending)
    try:
        async with asyncio.timeout(within_s):
            if host == IN_PROCESS:
                connect_here(link, port)
            else:
                context = tls and tls.context
                await link.loop.create_connection(lambda: link, host, port, ssl=context)
            await link.ready
    except (OSError, TimeoutError) as error:
        reason = (
            str(error) and explained(error, peer="replica")
        ) or f"the replica has not answered within {within_s:g} s"
        link.lose(LostError(reason))
        raise LostError(f"{host}:{port}: {reason}") from error
    return link


def _error(ended: StreamEnded) -> Exception:
    match ended.outcome:
        case "done":
            return _StreamDone()
        case "refused":
            return RefusedError(ended.message)
        case "invalid":
            return ValueError(ended.message)
        case "dead":
            return EngineDeadError(ended.message)
        case "failed":
            return FailedError(ended.message)
