"""The replica's end of connections: runs requests, and sends the generated tokens to the routers.

After an engine step, each router gets one message with the new tokens of all its requests.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import partial

import msgspec

from kvroute.contract.generation import (
    Chunk,
    EngineAwayError,
    EngineDeadError,
    Generate,
    GenerateRequest,
    NotBegunError,
    weight,
)
from kvroute.contract.preparation import on_prepared
from kvroute.wire import structs
from kvroute.wire.framed_connection import Connection, is_proof, proof
from kvroute.wire.framing import LARGEST_MESSAGE, MessageKind
from kvroute.wire.in_process import IN_PROCESS, Listener
from kvroute.wire.strangers import Strangers
from kvroute.wire.structs import NONCE_BYTES, VERSION, Outcome, StreamEnded, encode
from kvroute.wire.tls import Ends
from kvroute.wire.tls_listener import TlsListener

log = logging.getLogger("kvroute.wire")

HOST = "KVROUTE_REPLICA_HOST"  # environment variable: address on which replicas listen for routers

PROOF_S = 5.0  # seconds after which a connection without a proof is closed
LARGEST_UNPROVEN = 1024  # maximum size in bytes of a message from a peer without a proof
MAX_UNPROVEN = 256  # maximum number of connections without a proof
IDLE_REPORTS = 4  # how many reports without pending tokens are sent in a row
MAX_UNSENT = 4_000_000  # maximum of the chunks that wait for a slow router, in tokens: see weight()

Method = Callable[[bytes, int], Awaitable[bytes]]  # called with the body and the rank's number


def new_secret() -> bytes:
    """Return a random secret for a replica (wire/address.py)."""
    return secrets.token_bytes(32)


class PortsTakenError(OSError):
    """No port of the range is free."""


class Server:
    """Serves one replica's engine to routers that know the secret.

    Args:
        generate: runs a request on the engine.
        methods: the methods that routers can call, by name.
        max_requests: maximum number of running requests and calls; further requests are refused.
        secret: the replica's secret; None: a random one.
        tls: the replica's certificate; None: connections are not encrypted.
    """

    def __init__(
        self,
        generate: Generate,
        methods: Mapping[str, Method],
        *,
        max_requests: int,
        secret: bytes | None = None,
        tls: Ends | None = None,
    ) -> None:
        self.secret = secret or new_secret()
        self.generate = generate
        self.methods = {**methods}  # features add theirs before the start
        self.port = 0
        self.running = 0  # number of running requests and method calls
        self.refusals = 0  # number of refused requests since the start
        self.peers = set["Peer"]()  # the open connections
        self.unproven = Strangers["Peer"](MAX_UNPROVEN)  # connections without a proof
        self._max_requests = max_requests
        self._idle_reports = 0  # number of latest reports in a row that had no pending tokens
        self.reported: list[int] = []  # the latest report: pending prompt tokens of each rank
        self._is_stopping = False
        self.away_reason = ""  # why the engine cannot run requests now; empty: it can
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_alone = asyncio.Event()  # there is no connection
        self._is_alone.set()
        self._tls = tls
        self._server: asyncio.Server | TlsListener | Listener | None = None

    async def start(self, host: str, ports: Sequence[int] = (0,)) -> None:
        """Listen on the first free port, or in this process only (IN_PROCESS).

        Raises:
            PortsTakenError: no port is free.
        """
        if host == IN_PROCESS:
            self._server = Listener(lambda: Peer(self))
            self.port = self._server.port
            return
        for port in ports:
            try:
                self._server = await self._listen(host, port)
            except OSError as error:
                taken = error
                continue
            self.port = self._server.sockets[0].getsockname()[1]
            return
        raise PortsTakenError(
            f"no port of {ports[0]}-{ports[-1]} is free on {host} ({taken}); set a wider range "
            "with --replica-ports"
        )

    async def _listen(self, host: str, port: int) -> asyncio.Server | TlsListener:
        if self._tls is None:
            loop = asyncio.get_running_loop()
            return await loop.create_server(lambda: Peer(self), host, port)
        return TlsListener(
            host,
            port,
            tls=self._tls,
            protocol=lambda certificate: Peer(self, certificate),
            within_s=PROOF_S,
            most=MAX_UNPROVEN,
        )

    def refusal(self) -> str:
        """Return why the replica refuses requests now; empty: it accepts them."""
        if self._is_stopping:
            return "the replica is stopping"
        if self.away_reason:
            return f"the replica's engine is away: {self.away_reason}"
        if self.running >= self._max_requests:
            return f"the replica runs {self.running} requests, which is its maximum"
        return ""

    def set_away(self, reason: str) -> None:
        """Refuse requests for this reason; empty: accept them again. Report it to all routers."""
        self.away_reason = reason
        for peer in self.peers:
            peer.report_away(reason)

    def report_pending(self, pending_tokens: Sequence[int]) -> None:
        """Report to all routers how many prompt tokens each rank still has to compute.

        After IDLE_REPORTS reports without pending tokens, no more are sent until there are some.
        """
        self._idle_reports = 0 if any(pending_tokens) else self._idle_reports + 1
        if self._idle_reports > IDLE_REPORTS:
            return
        self.reported = [*pending_tokens]
        for peer in self.peers:
            peer.report_pending(self.reported)

    def stop(self) -> None:
        """Refuse all further requests; let running requests continue.

        Called also when the engine has died. The requests that it ran then are suspected as the
        cause, and a later request must not be.
        """
        self._is_stopping = True

    async def idle(self) -> None:
        """Wait until no request or call runs."""
        await self._is_idle.wait()

    async def alone(self) -> None:
        """Wait until no router is connected."""
        await self._is_alone.wait()

    async def close(self) -> None:
        """Stop listening, and end all requests and connections."""
        if self._server is not None:
            self._server.close()
        if isinstance(self._server, TlsListener):
            await self._server.wait_closed()
        tasks = [task for peer in self.peers for task in peer.close()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def connected(self, peer: "Peer") -> None:
        """Add a connection, which has no proof yet."""
        self.peers.add(peer)
        self._is_alone.clear()
        if oldest := self.unproven.add(peer):
            oldest.reject(f"{MAX_UNPROVEN} later connections have not sent a proof yet")

    def disconnected(self, peer: "Peer") -> None:
        """Remove a connection."""
        self.peers.discard(peer)
        self.unproven.discard(peer)
        if not self.peers:
            self._is_alone.set()

    def request_started(self) -> None:
        """Count a request or call that starts to run."""
        self.running += 1
        self._is_idle.clear()

    def request_ended(self) -> None:
        """Count a request or call that has ended."""
        self.running -= 1
        if not self.running:
            self._is_idle.set()


class Peer(Connection):
    """The replica's end of the connection from one router."""

    def __init__(self, server: Server, certificate: bytes = b"") -> None:
        """Create the end of a connection that is not made yet.

        Args:
            server: the replica's server.
            certificate: digest of the replica's certificate; empty: the connection has no TLS.
        """
        super().__init__()
        self._server, self._certificate = server, certificate
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._is_proven = False  # whether the router has proven that it knows the secret
        self._reader.largest = LARGEST_UNPROVEN
        self._tasks: dict[int, asyncio.Task[None]] = {}  # running requests and calls, by stream
        self._chunks: list[tuple[int, Chunk]] = []  # chunks to send
        self._ended: list[StreamEnded] = []  # the ends of streams, to send after _chunks
        self._unsent = 0  # weight() of _chunks, in tokens
        self._is_flush_due = False  # whether _flush runs in the event loop's next iteration
        self._is_paused = False  # the transport's write buffer has more than HIGH_WATER bytes
        self._loop = asyncio.get_running_loop()

    def __str__(self) -> str:
        peer = self.transport and self.transport.get_extra_info("peername")
        return f"the connection from router {peer}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.connected(self)
        self.send(MessageKind.CHALLENGE, encode(structs.Challenge(VERSION, self._nonce)))
        self._loop.call_later(PROOF_S, self._check_proof_arrived)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.disconnected(self)
        self.close()

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel the peer's tasks and close the connection; return the tasks to await."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if self.transport is not None:
            self.transport.close()
        return tasks

    def received(self, kind: int, payload: bytes) -> None:
        if not self._is_proven:
            self._check_proof(kind, payload)
            return
        match kind:
            case MessageKind.BEGIN:
                self._begin(payload)
            case MessageKind.CANCEL:
                self._cancel(structs.decode_cancel(payload).stream)
            case MessageKind.CALL:
                call = structs.decode_call(payload)
                self._run(call.stream, self._answer(call))

    def report_pending(self, pending_tokens: Sequence[int]) -> None:
        """Report pending tokens to the router, unless its write buffer is full."""
        if self._is_proven and not self._is_paused:
            self.send(MessageKind.PENDING, encode(structs.Pending([*pending_tokens])))

    def report_away(self, reason: str) -> None:
        """Report to the router why the engine can run no requests; empty: it can."""
        if self._is_proven:
            self.send(MessageKind.AWAY, encode(structs.Away(reason)))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def reject(self, reason: str) -> None:
        """Close a connection without a proof, and log no warning, since anybody can connect."""
        self.abort(reason, level=logging.INFO)

    def _check_proof_arrived(self) -> None:
        if not self._is_proven and self.transport and not self.transport.is_closing():
            self.reject(f"it has not sent a proof within {PROOF_S:g} s")

    def _check_proof(self, kind: int, payload: bytes) -> None:
        secret = self._server.secret
        received = structs.decode_proof(payload) if kind == MessageKind.PROOF else None
        if received is None or not is_proof(
            received.proof, secret, b"router", self._nonce, self._certificate
        ):
            self.reject("the peer does not know the secret")
            return
        self._is_proven = True
        self._server.unproven.discard(self)
        self._reader.largest = LARGEST_MESSAGE
        own_proof = proof(secret, b"replica", received.nonce, self._certificate)
        self.send(MessageKind.WELCOME, encode(structs.Welcome(own_proof)))
        self.report_pending(self._server.reported)
        if reason := self._server.away_reason:
            self.report_away(reason)

    def _begin(self, payload: bytes) -> None:
        stream, request = structs.decode_begin(payload)
        if reason := self._server.refusal():
            self._server.refusals += 1
            self._end(stream, "refused", reason)
            return
        self._run(stream, self._stream(stream, request))

    def _run(self, stream: int, work: Coroutine[None, None, None]) -> None:
        """Start the task of a stream, which the router can cancel."""
        if stream in self._tasks:
            work.close()
            raise ValueError(f"stream {stream} is already open")
        task = self._tasks[stream] = self._loop.create_task(work)
        self._server.request_started()
        task.add_done_callback(lambda _: self._forget(stream))

    def _forget(self, stream: int) -> None:
        del self._tasks[stream]
        self._server.request_ended()

    def _cancel(self, stream: int) -> None:
        if task := self._tasks.get(stream):
            task.cancel()

    async def _stream(self, stream: int, request: GenerateRequest) -> None:
        try:
            self.send(MessageKind.TAKEN, encode(structs.Preparing(stream)))
            on_prepared(lambda: self.send(MessageKind.PREPARED, encode(structs.Preparing(stream))))
            await self._server.generate(request, partial(self._push, stream))
        except Exception as error:  # the engine may raise any error
            self._fail(stream, error)
        else:
            self._end(stream, "done")

    async def _answer(self, call: structs.MethodCall) -> None:
        try:
            if (method := self._server.methods.get(call.method)) is None:
                raise ValueError(f"this replica has no method {call.method!r}")
            body = await method(call.body, call.rank)
        except Exception as error:  # the method may raise any error
            self._fail(call.stream, error)
        else:
            self.send(MessageKind.REPLY, encode(structs.MethodReply(call.stream, body)))

    def _push(self, stream: int, chunk: Chunk) -> None:
        """Queue the chunk, to send it in one message with the other chunks of this engine step."""
        self._chunks.append((stream, chunk))
        self._unsent += weight(chunk)
        self._flush_soon()

    def _end(self, stream: int, outcome: Outcome, message: str = "") -> None:
        self._ended.append(StreamEnded(stream, outcome, message))
        self._flush_soon()

    def _fail(self, stream: int, error: Exception) -> None:
        if isinstance(error, EngineDeadError) and not isinstance(error, EngineAwayError):
            self._server.stop()
        self._end(stream, *_outcome(error))

    def _flush_soon(self) -> None:
        """Flush in the event loop's next iteration, when all chunks of this step are queued."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_paused:
            if self._unsent > MAX_UNSENT:
                self._chunks, self._unsent = [], 0
                self.abort(
                    f"the router reads too slowly: more than {MAX_UNSENT} tokens wait for it"
                )
            return  # resume_writing calls this again
        if self._chunks or self._ended:
            self.send(MessageKind.DELTAS, encode(structs.Deltas(self._chunks, self._ended)))
            self._chunks, self._ended, self._unsent = [], [], 0


def _outcome(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, NotBegunError):
        return "refused", str(error)
    if isinstance(error, EngineDeadError):
        return "dead", str(error)
    if isinstance(error, ValueError) and not isinstance(error, msgspec.MsgspecError):
        return "invalid", str(error)
    log.error("a request failed with an unexpected error", exc_info=error)
    return "failed", f"{type(error).__name__}: {error}"
