"""The replica's end: runs the routers' requests, and sends each router a frame per engine step."""

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
    weight,
)
from kvroute.contract.preparation import on_prepared
from kvroute.wire import structs
from kvroute.wire.connection import Connection, is_proof, proof
from kvroute.wire.framing import LARGEST_MESSAGE, MessageKind
from kvroute.wire.structs import NONCE_BYTES, VERSION, Outcome, StreamEnded, encode

log = logging.getLogger("kvroute.wire")

HOST = "KVROUTE_REPLICA_HOST"  # environment variable: address on which replicas listen for routers

PROOF_S = 5.0  # most seconds to wait for a router's proof
LARGEST_UNPROVEN = 1024  # most bytes in a message of a peer without a proof
MAX_UNPROVEN = 256  # most connections of peers without a proof
IDLE_REPORTS = 4  # reports without pending tokens in a row, after which no more are sent
MAX_UNSENT = 4_000_000  # most tokens that wait for a router that does not read, by `weight`

Method = Callable[[bytes, int], Awaitable[bytes]]  # called with the body and the rank's number


class PortsTakenError(OSError):
    """No port of the range is free."""


class Server:
    """Serves one replica's engine to routers that know the secret.

    Args:
        generate: runs a request on the engine.
        methods: the methods that routers can call, by name.
        most: most requests at a time; further ones are refused.
    """

    def __init__(self, generate: Generate, methods: Mapping[str, Method], *, most: int) -> None:
        self.secret = secrets.token_bytes(32)
        self.generate = generate
        self.methods = methods
        self.port = 0
        self.running = 0  # number of running requests
        self.refusals = 0  # number of refused requests since the start
        self.peers = set["Peer"]()
        self._most = most
        self._idle_reports = 0  # number of latest reports in a row without pending tokens
        self.reported: list[int] = []  # pending prompt tokens of each rank in the latest report
        self._is_stopping = False
        self.away_reason = ""  # why the engine cannot run requests now; empty: it can
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, ports: Sequence[int] = (0,)) -> None:
        """Listen on the first free port. Raises PortsTakenError."""
        loop = asyncio.get_running_loop()
        for port in ports:
            try:
                self._server = await loop.create_server(lambda: Peer(self), host, port)
            except OSError as error:
                taken = error
                continue
            self.port = self._server.sockets[0].getsockname()[1]
            return
        raise PortsTakenError(
            f"no port of {ports[0]}-{ports[-1]} is free on {host} ({taken}); set a wider range "
            "with --replica-ports"
        )

    def refusal(self) -> str:
        """Return why a request cannot begin now; empty: it can."""
        if self._is_stopping:
            return "the replica is stopping"
        if self.away_reason:
            return f"its server is away: {self.away_reason}"
        if self.running >= self._most:
            return f"the replica runs {self.running} requests, as many as it may"
        return ""

    def report_pending(self, pending_tokens: Sequence[int]) -> None:
        """Send all routers a report of the prompt tokens that each rank has to compute.

        After IDLE_REPORTS reports without pending tokens, no more of them are sent.
        """
        self._idle_reports = 0 if any(pending_tokens) else self._idle_reports + 1
        if self._idle_reports > IDLE_REPORTS:
            return
        self.reported = [*pending_tokens]
        for peer in self.peers:
            peer.report_pending(self.reported)

    def stop(self) -> None:
        """Refuse all requests from now on; running requests continue.

        This is also called when the engine has died, so that later requests are not blamed for it.
        """
        self._is_stopping = True

    async def idle(self) -> None:
        """Wait until no request runs."""
        await self._is_idle.wait()

    async def close(self) -> None:
        """Stop listening, and end all requests and connections."""
        if self._server is not None:
            self._server.close()
        tasks = [task for peer in self.peers for task in peer.close()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def began(self) -> None:
        self.running += 1
        self._is_idle.clear()

    def ended(self) -> None:
        self.running -= 1
        if not self.running:
            self._is_idle.set()


class Peer(Connection):
    """The connection to one router."""

    def __init__(self, server: Server) -> None:
        super().__init__()
        self._server = server
        self._nonce = secrets.token_bytes(NONCE_BYTES)
        self._is_proven = False
        self._reader.largest = LARGEST_UNPROVEN
        self._tasks: dict[int, asyncio.Task[None]] = {}  # running requests and calls, by stream
        self._chunks: list[tuple[int, Chunk]] = []  # chunks to send
        self._ended: list[StreamEnded] = []  # ends of streams to send after _chunks
        self._unsent = 0  # weight of _chunks
        self._is_flush_due = False
        self._is_paused = False  # the transport's write buffer is above HIGH_WATER
        self._loop = asyncio.get_running_loop()

    def __str__(self) -> str:
        peer = self.transport and self.transport.get_extra_info("peername")
        return f"the connection from router {peer}"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.peers.add(self)
        if sum(not peer._is_proven for peer in self._server.peers) > MAX_UNPROVEN:
            self._send_away(f"{MAX_UNPROVEN} other connections wait for a proof")
            return
        self.send(MessageKind.CHALLENGE, encode(structs.Challenge(VERSION, self._nonce)))
        self._loop.call_later(PROOF_S, self._expect_proof)

    def connection_lost(self, error: Exception | None) -> None:
        self._server.peers.discard(self)
        self.close()

    def close(self) -> list[asyncio.Task[None]]:
        """Cancel the peer's tasks and close the connection; return the tasks, to be awaited."""
        tasks = [*self._tasks.values()]
        for task in tasks:
            task.cancel()
        if self.transport is not None:
            self.transport.close()
        return tasks

    def received(self, kind: int, payload: bytes) -> None:
        if not self._is_proven:
            self._prove(kind, payload)
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
        """Report pending tokens to the router, unless it does not read."""
        if self._is_proven and not self._is_paused:
            self.send(MessageKind.PENDING, encode(structs.Pending([*pending_tokens])))

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._flush()

    def _send_away(self, reason: str) -> None:
        """Close a connection without a proof; this is no warning, since anybody can connect."""
        self.abort(reason, level=logging.INFO)

    def _expect_proof(self) -> None:
        if not self._is_proven and self.transport and not self.transport.is_closing():
            self._send_away(f"no proof within {PROOF_S:g} s")

    def _prove(self, kind: int, payload: bytes) -> None:
        secret = self._server.secret
        given = structs.decode_proof(payload) if kind == MessageKind.PROOF else None
        if given is None or not is_proof(given.proof, secret, b"router", self._nonce):
            self._send_away("the peer does not know the secret")
            return
        self._is_proven = True
        self._reader.largest = LARGEST_MESSAGE
        self.send(
            MessageKind.WELCOME, encode(structs.Welcome(proof(secret, b"replica", given.nonce)))
        )
        self.report_pending(self._server.reported)

    def _begin(self, payload: bytes) -> None:
        stream, request = structs.decode_begin(payload)
        if reason := self._server.refusal():
            self._server.refusals += 1
            self._end(stream, "refused", reason)
            return
        self._run(stream, self._stream(stream, request))

    def _run(self, stream: int, work: Coroutine[None, None, None]) -> None:
        """Start the stream's task, which a router can cancel."""
        if stream in self._tasks:
            work.close()
            raise ValueError(f"stream {stream} is already open")
        task = self._tasks[stream] = self._loop.create_task(work)
        self._server.began()
        task.add_done_callback(lambda _: self._forget(stream))

    def _forget(self, stream: int) -> None:
        del self._tasks[stream]
        self._server.ended()

    def _cancel(self, stream: int) -> None:
        if task := self._tasks.get(stream):
            task.cancel()

    async def _stream(self, stream: int, request: GenerateRequest) -> None:
        try:
            self.send(MessageKind.TAKEN, encode(structs.Preparing(stream)))
            on_prepared(lambda: self.send(MessageKind.PREPARED, encode(structs.Preparing(stream))))
            await self._server.generate(request, partial(self._push, stream))
        except Exception as error:  # any error of the engine
            self._fail(stream, error)
        else:
            self._end(stream, "done")

    async def _answer(self, call: structs.MethodCall) -> None:
        try:
            if (method := self._server.methods.get(call.method)) is None:
                raise ValueError(f"this replica has no method {call.method!r}")
            body = await method(call.body, call.rank)
        except Exception as error:  # any error of the method
            self._fail(call.stream, error)
        else:
            self.send(MessageKind.REPLY, encode(structs.MethodReply(call.stream, body)))

    def _push(self, stream: int, chunk: Chunk) -> None:
        """Send the chunk in one frame with all other chunks of this engine step."""
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
        """Flush in the event loop's next iteration, when all streams of the step have chunks."""
        if not self._is_flush_due:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_due = False
        if self._is_paused:
            if self._unsent > MAX_UNSENT:
                self._chunks, self._unsent = [], 0
                self.abort(f"the router has not read more than {MAX_UNSENT} tokens")
            return  # resume_writing calls this again
        if self._chunks or self._ended:
            self.send(MessageKind.DELTAS, encode(structs.Deltas(self._chunks, self._ended)))
            self._chunks, self._ended, self._unsent = [], [], 0


def _outcome(error: Exception) -> tuple[Outcome, str]:
    if isinstance(error, EngineDeadError):
        return "dead", str(error)
    if isinstance(error, ValueError) and not isinstance(error, msgspec.MsgspecError):
        return "invalid", str(error)
    log.error("a request failed", exc_info=error)
    return "failed", f"{type(error).__name__}: {error}"
