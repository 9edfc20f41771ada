"""Requests and answers over real connections between a router's end and a replica's."""

import asyncio
import contextlib
import math
import random
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import (
    BYTES_PER_TOKEN,
    Chunk,
    Emit,
    EngineDeadError,
    GenerateRequest,
    NotBegunError,
)
from kvroute.contract.http_call import HttpCall, HttpPart
from kvroute.contract.keep import RetentionHint
from kvroute.contract.messages import Dispatch, Fingerprints, RouterMessage
from kvroute.contract.messages import decode as decode_message
from kvroute.contract.messages import encode as encode_message
from kvroute.contract.records import VERSION as MESSAGE_VERSION
from kvroute.wire import server as replicas_end
from kvroute.wire.framing import HEADER, LARGEST_FRAME, FramingError, MessageKind, Reader, frames
from kvroute.wire.in_process import IN_PROCESS, Listener
from kvroute.wire.link import (
    MAX_CHUNKS,
    SLICE,
    FailedError,
    Link,
    LostError,
    RefusedError,
    SlowReaderError,
    Stream,
    connect,
)
from kvroute.wire.server import IDLE_REPORTS, PortsTakenError, Server
from kvroute.wire.structs import (
    MAX_ORDER_S,
    VERSION,
    Challenge,
    Deltas,
    StreamEnded,
    Welcome,
    decode_begin,
    encode,
    encode_begin,
)
from tests.support.waiting import until

LOOPBACK = "127.0.0.1"
MOST = 10_000  # tokens that may wait in a stream


def request(tokens: int = 10, **more: Any) -> GenerateRequest:
    prompt = np.arange(tokens, dtype=np.uint32)
    return GenerateRequest("r", prompt, max_tokens=5, **more)


def chunk(token_id: int, *, is_last: bool = False) -> Chunk:
    return Chunk((token_id,), 4, is_last, HttpPart(f" {token_id}".encode(), deltas=(1,)))


class Engine:
    """Every stream gets a token when `step` is called, and ends after `tokens`."""

    def __init__(self, tokens: int = 5) -> None:
        self.tokens = tokens
        self.requests: list[GenerateRequest] = []
        self.running = 0
        self.error: Exception | None = None
        self._step = asyncio.Event()

    def step(self) -> None:
        self._step.set()
        self._step = asyncio.Event()

    async def steps(self, number: int) -> None:
        for _ in range(number):
            self.step()
            for _ in range(10):
                await asyncio.sleep(0)

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        self.requests.append(request)
        self.running += 1
        try:
            for number in range(1, self.tokens + 1):
                await self._step.wait()
                if self.error:
                    raise self.error
                emit(chunk(number, is_last=number == self.tokens))
        finally:
            self.running -= 1


async def echo(body: bytes, rank: int) -> bytes:
    return body


async def hang(_: bytes, rank: int) -> bytes:
    await asyncio.Event().wait()
    return b""


@contextlib.asynccontextmanager
async def served(
    engine: Engine, *, most: int = 1000, links: int = 1, host: str = LOOPBACK
) -> AsyncIterator[tuple[Server, list[Link]]]:
    server = Server(engine.generate, {"echo": echo}, max_requests=most)
    await server.start(host)
    connected = [await linked(server) for _ in range(links)]
    yield server, connected
    for link in connected:
        link.lose(LostError("the test is over"))
    await server.close()


async def linked(server: Server, secret: bytes | None = None) -> Link:
    return await connect("a", host_of(server), server.port, secret or server.secret, within_s=5)


def host_of(server: Server) -> str:
    return IN_PROCESS if isinstance(server._server, Listener) else LOOPBACK


both_ways = pytest.mark.parametrize("host", [LOOPBACK, IN_PROCESS])


async def read(stream: Stream) -> list[Chunk]:
    chunks = []
    while (chunk := await stream.next()) is not None:
        chunks.append(chunk)
    return chunks


def ids(chunks: list[Chunk]) -> list[int]:
    return [id_ for chunk in chunks for id_ in chunk.token_ids]


@both_ways
async def test_routers_learn_that_the_engine_is_away_and_back(host: str) -> None:
    async with served(Engine(), host=host) as (server, (link,)):
        server.set_away("its server does not answer")
        late = await linked(server)
        await until(lambda: link.away_reason and late.away_reason)
        assert late.away_reason == "its server does not answer"
        assert server.refusal()
        server.set_away("")
        await until(lambda: not (link.away_reason or late.away_reason))
        assert not server.refusal()
        late.lose(LostError("the test is over"))


# Frames.


@given(
    st.lists(st.tuples(st.sampled_from(MessageKind), st.binary(max_size=40)), max_size=12),
    st.lists(st.integers(0, 50), max_size=30),
)
def test_messages_are_read_however_their_bytes_come(
    sent: list[tuple[MessageKind, bytes]], cuts: list[int]
) -> None:
    data = b"".join(frame for kind, payload in sent for frame in frames(kind, payload))
    reader, got = Reader(), list[tuple[int, bytes]]()
    for cut in [*cuts, len(data)]:
        got += reader.feed(data[:cut])
        data = data[cut:]
    assert got == sent


@pytest.mark.parametrize("size", [LARGEST_FRAME, LARGEST_FRAME + 1, 3 * LARGEST_FRAME + 17])
def test_a_long_message_takes_several_frames(size: int) -> None:
    payload = random.Random(size).randbytes(size)
    parts = list(frames(MessageKind.BEGIN, payload))
    assert len(parts) == -(-size // LARGEST_FRAME)
    assert max(map(len, parts)) <= LARGEST_FRAME + HEADER.size
    assert [*Reader().feed(b"".join(parts))] == [(MessageKind.BEGIN, payload)]


def test_a_message_that_is_too_long_is_refused_before_it_has_arrived() -> None:
    reader = Reader()
    reader.largest = 100
    with pytest.raises(FramingError):
        list(reader.feed(HEADER.pack(101, MessageKind.BEGIN)))
    with pytest.raises(FramingError):
        list(Reader().feed(HEADER.pack(LARGEST_FRAME + 1, MessageKind.BEGIN)))


def crossed(request: GenerateRequest) -> GenerateRequest:
    """Return the request as the replica decodes it."""
    return decode_begin(encode_begin(0, request))[1]


def test_the_bytes_of_a_request_are_those_of_version_4() -> None:
    """Routers and replicas of two releases work together: fields may only be added at an end."""
    call = HttpCall("/v1/completions", b"{}", 1.5)
    told = request(
        2, namespace="n", trace={"traceparent": "x"}, call=call, keep=RetentionHint(), pin="local"
    )
    assert encode_begin(7, told).hex() == BEGIN


BEGIN = (
    "dc001107a172c4080000000001000000a16e0081ab7472616365706172656e74a178a000dc0011af"
    "2f76312f636f6d706c6574696f6e73c4027b7dcb3ff8000000000000c3c2900000a0a0a0c2c2a080"
    "c0ff050000cb0000000000000000cb0000000000000000920200c2c0"
)


def test_the_bytes_of_a_dispatch_between_routers_are_those_of_its_version() -> None:
    blocks = Fingerprint(1), Fingerprint(2**63 + 5)
    known, expected = Fingerprints(blocks[:1]), Fingerprints(blocks)
    dispatch = Dispatch("q", "r", 0.5, 10, 20, known, expected, "l", loads_first=True)
    assert encode_message(dispatch).hex() == DISPATCH
    (got,) = decode_message(encode_message(RouterMessage(MESSAGE_VERSION, "x", [dispatch]))).events
    assert isinstance(got, Dispatch)
    assert (got.known_block, got.expected.blocks) == (1, blocks)


DISPATCH = (
    "9ca173a171a172cb3fe00000000000000a14c4080100000000000000c41001000000000000000500"
    "000000000080a16cc3c0c2"
)


def test_a_request_is_the_same_on_the_other_side() -> None:
    sent = request(1000, answered=3, trace={"traceparent": "x"}, variant="l", expected_tokens=64)
    got = crossed(sent)
    assert got.token_ids.tolist() == sent.token_ids.tolist()
    assert [getattr(got, name) for name in SAME] == [getattr(sent, name) for name in SAME]


SAME = ("request_id", "max_tokens", "namespace", "answered", "trace", "variant", "expected_tokens")


@given(st.floats())
def test_an_order_is_sent_unchanged_or_limited_to_a_valid_number(order_s: float) -> None:
    got = crossed(request(order_s=order_s)).order_s
    if math.isfinite(order_s):
        assert got == min(max(order_s, -MAX_ORDER_S), MAX_ORDER_S)
    else:
        assert got == 0


ORDER = 1 + GenerateRequest.__struct_fields__.index("order_s")


def test_a_router_that_knows_no_order_sends_requests_in_theirs() -> None:
    told = request(order_s=5.0, waited_s=5.0)
    fields = msgspec.msgpack.decode(encode_begin(0, told))[:ORDER]
    _, got = decode_begin(msgspec.msgpack.encode(fields))
    assert (got.order_s, got.waited_s) == (0, 0)


@pytest.mark.parametrize(
    ("given_s", "got_s"), [(2.5, 2.5), (-1.0, 0.0), (math.inf, 0.0), (1e300, MAX_ORDER_S)]
)
def test_a_wait_is_sent_unchanged_or_limited_to_a_valid_number(
    given_s: float, got_s: float
) -> None:
    assert crossed(request(waited_s=given_s)).waited_s == got_s


# Answers.


@both_ways
async def test_a_step_is_one_message_for_all_streams_of_a_router(host: str) -> None:
    engine = Engine(tokens=20)
    async with served(engine, links=2, host=host) as (_, links):
        streams = [link.open(request(), max_waiting=MOST) for link in links for _ in range(50)]
        await until(lambda: engine.running == 100)
        await until(lambda: all(stream.is_preparing for stream in streams))  # both ends know it
        before = [link.received_messages for link in links]
        for _ in range(20):
            engine.step()
            first = [await stream.next() for stream in streams]
            assert len({each and each.token_ids for each in first}) == 1
        assert [link.received_messages - was for link, was in zip(links, before, strict=True)] == [
            20,
            20,
        ]
        assert [await stream.next() for stream in streams] == [None] * 100


@both_ways
async def test_chunks_that_arrive_before_a_read_are_joined(host: str) -> None:
    engine = Engine()
    async with served(engine, host=host) as (_, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        await engine.steps(5)
        await until(lambda: not link.streams)
        all_of_it = await stream.next()
        part = HttpPart(b" 1 2 3 4 5", deltas=(1,) * 5)
        assert all_of_it == Chunk((1, 2, 3, 4, 5), 4, is_last=True, http=part)
        assert await stream.next() is None


@both_ways
async def test_the_memory_for_a_slow_reader_is_limited(host: str) -> None:
    engine = Engine(tokens=100_000)
    async with served(engine, host=host) as (server, (link,)):
        stream = link.open(request(), max_waiting=50)
        await until(lambda: engine.running == 1)
        await engine.steps(60)
        with pytest.raises(SlowReaderError, match="has not read 51 tokens"):
            await stream.next()
        await until(lambda: not engine.running)
        assert await link.call("echo", b"still") == b"still"
        assert not server.running


async def test_a_stream_that_nobody_reads_is_few_objects() -> None:
    stream = Stream(Link("a", b""), 0, 10_000)
    for number in range(1000):
        stream.push(Chunk((number,), 0, http=HttpPart(b"x", deltas=(1,))))
        assert len(stream._chunks) < MAX_CHUNKS
    assert await stream.next() == Chunk(
        tuple(range(1000)), 0, http=HttpPart(b"x" * 1000, deltas=(1,) * 1000)
    )


async def test_http_bytes_count_towards_the_limit_of_a_slow_reader() -> None:
    stream = Stream(Link("a", b""), 0, 50)
    for number in range(3):
        stream.push(Chunk((number,), 0, http=HttpPart(b"x" * 20 * BYTES_PER_TOKEN)))
    with pytest.raises(SlowReaderError):
        await stream.next()


@pytest.mark.parametrize(
    ("error", "there"),
    [
        (ValueError("too long"), ValueError),
        (EngineDeadError("it died"), EngineDeadError),
        (KeyError("oh"), FailedError),
    ],
)
@both_ways
async def test_an_error_of_the_engine_comes_after_what_it_generated(
    error: Exception, there: type[Exception], host: str
) -> None:
    engine = Engine()
    async with served(engine, host=host) as (_, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        await engine.steps(2)
        engine.error = error
        engine.step()
        await until(lambda: not link.streams)
        assert ids([(await stream.next()) or chunk(0)]) == [1, 2]
        with pytest.raises(there, match=str(error.args[0])):
            await stream.next()


@both_ways
async def test_a_replica_with_a_dead_engine_refuses_further_requests(host: str) -> None:
    """Whoever asks it now has lost nothing."""
    engine = Engine()
    async with served(engine, host=host) as (_, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        engine.error = EngineDeadError("it died")
        engine.step()
        with pytest.raises(EngineDeadError):
            await stream.next()
        with pytest.raises(RefusedError):
            await link.open(request(), max_waiting=MOST).next()


@both_ways
async def test_an_engine_that_has_not_begun_refuses_one_request_and_runs_the_next(
    host: str,
) -> None:
    engine = Engine()
    async with served(engine, host=host) as (_, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        engine.error = NotBegunError("no connection")
        engine.step()
        with pytest.raises(RefusedError, match="no connection"):
            await stream.next()
        engine.error = None
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        engine.step()
        assert len(ids([(await stream.next()) or chunk(0)])) == 1


@pytest.mark.parametrize("how", ["cancel", "the link", "the server"])
@both_ways
async def test_a_cancel_a_lost_link_or_a_closed_server_ends_the_request(
    how: str, host: str
) -> None:
    engine = Engine()
    async with served(engine, host=host) as (server, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        if how == "cancel":
            stream.cancel()
            stream.cancel()
        elif how == "the link":
            link.lose(LostError("as planned"))
        else:
            await server.close()
        await until(lambda: not engine.running and not server.running)
        await asyncio.wait_for(server.idle(), 60)


@both_ways
async def test_a_connection_that_ends_ends_its_streams_and_calls(host: str) -> None:
    engine = Engine()
    async with served(engine, host=host) as (server, (link,)):
        server.methods = {"hang": hang}
        stream = link.open(request(), max_waiting=MOST)
        call = asyncio.create_task(link.call("hang"))
        await until(lambda: server.running == 2)
        (peer,) = server.peers
        peer.abort("as planned")
        with pytest.raises(LostError):
            await stream.next()
        with pytest.raises(LostError):
            await call
        with pytest.raises(LostError):
            link.open(request(), max_waiting=MOST)


@both_ways
async def test_a_million_tokens_pass(host: str) -> None:
    engine = Engine()
    async with served(engine, host=host) as (_, (link,)):
        link.open(request(1_000_000), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        assert len(engine.requests[0].token_ids) == 1_000_000


@both_ways
async def test_a_call_returns_an_answer_or_raises_the_reason(host: str) -> None:
    async with served(Engine(), host=host) as (_, (link,)):
        assert await link.call("echo", b"x" * 3_000_000) == b"x" * 3_000_000
        with pytest.raises(ValueError, match="has no method 'what'"):
            await link.call("what")


# Room.


@pytest.mark.parametrize("stops", [False, True])
@both_ways
async def test_a_replica_at_its_maximum_refuses_requests_at_once(stops: bool, host: str) -> None:
    engine = Engine()
    async with served(engine, most=1, host=host) as (server, (link,)):
        first = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        if stops:
            server.stop()
        with pytest.raises(RefusedError, match="is stopping" if stops else "runs 1 requests"):
            await link.open(request(), max_waiting=MOST).next()
        idle = asyncio.create_task(server.idle())
        await engine.steps(5)
        assert ids(await read(first)) == [1, 2, 3, 4, 5]
        await asyncio.wait_for(idle, 60)


async def test_a_router_that_does_not_read_is_given_up_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replicas_end, "MAX_UNSENT", 50)
    engine = Engine(tokens=1_000_000)
    async with served(engine, links=2) as (server, (deaf, fine)):
        deaf.open(request(), max_waiting=1 << 40)
        good = fine.open(request(), max_waiting=1 << 40)
        await until(lambda: engine.running == 2)
        assert deaf.transport is not None
        deaf.transport.pause_reading()
        (peer,) = (peer for peer in server.peers if 0 in peer._tasks and is_to(peer, deaf))
        peer.pause_writing()  # as when megabytes wait to be sent
        await until(lambda: is_over(engine), within_s=30)
        assert (await good.next()) is not None


def is_to(peer: Any, link: Link) -> bool:
    assert link.transport is not None
    ours: object = link.transport.get_extra_info("sockname")
    return bool(peer.transport.get_extra_info("peername") == ours)


def is_over(engine: Engine) -> bool:
    engine.step()
    return engine.running == 1


@both_ways
async def test_waiting_chunks_are_sent_when_the_router_reads_again(host: str) -> None:
    engine = Engine()
    async with served(engine, host=host) as (server, (link,)):
        stream = link.open(request(), max_waiting=MOST)
        await until(lambda: engine.running == 1)
        (peer,) = server.peers
        peer.pause_writing()
        await engine.steps(5)
        assert link.streams == 1
        peer.resume_writing()
        assert ids(await read(stream)) == [1, 2, 3, 4, 5]


async def test_a_replica_that_does_not_read_gets_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.wire.link.MAX_UNSENT", 10_000_000)
    async with served(Engine()) as (server, (link,)):
        (peer,) = server.peers
        assert peer.transport is not None
        peer.transport.pause_reading()
        for _ in range(20):
            with contextlib.suppress(RefusedError):
                link.open(request(500_000), max_waiting=MOST)
        with pytest.raises(RefusedError, match="bytes wait to be sent"):
            link.open(request(), max_waiting=MOST)


# Strangers.


@both_ways
async def test_a_replica_reports_pending_tokens_until_there_are_none(host: str) -> None:
    async with served(Engine(), links=0, host=host) as (server, _):
        heard: list[Sequence[int]] = []
        server.report_pending([1, 2])
        early = await connect(
            *("a", host, server.port, server.secret), within_s=5, on_pending=heard.append
        )
        await until(lambda: heard == [[1, 2]])
        server.report_pending([1, 2])
        for _ in range(10):
            server.report_pending([0, 0])
        server.report_pending([3, 0])
        await until(lambda: heard and heard[-1] == [3, 0])
        assert heard == [[1, 2], [1, 2], *[[0, 0]] * IDLE_REPORTS, [3, 0]]
        early.lose(LostError("over"))


async def test_both_ends_must_know_the_secret() -> None:
    async with served(Engine()) as (server, _):
        with pytest.raises(LostError):
            await linked(server, b"another secret")
        assert len(server.peers) == 1

    false = (
        (MessageKind.CHALLENGE, Challenge(VERSION, b"n" * 16)),
        (MessageKind.WELCOME, Welcome(b"p")),
    )
    async with impostor(*false) as port:
        with pytest.raises(LostError, match="does not know the replica's secret"):
            await connect("a", LOOPBACK, port, b"secret", within_s=5)


async def test_another_protocol_version_is_refused_with_a_clear_error() -> None:
    async with impostor((MessageKind.CHALLENGE, Challenge(0, b"n" * 16))) as port:
        with pytest.raises(LostError, match=f"version is 0, and this router's is {VERSION}"):
            await connect("a", LOOPBACK, port, b"secret", within_s=5)


@contextlib.asynccontextmanager
async def impostor(*messages: tuple[MessageKind, Any]) -> AsyncIterator[int]:
    """The port of a process that sends this to whoever comes."""
    gone = asyncio.Event()

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for kind, message in messages:
            writer.writelines(frames(kind, encode(message)))
        with contextlib.suppress(ConnectionError):
            await reader.read(1 << 20)
            await reader.read()
        writer.close()
        gone.set()

    async with await asyncio.start_server(say, LOOPBACK, 0) as server:
        yield server.sockets[0].getsockname()[1]
        await asyncio.wait_for(gone.wait(), 60)


async def test_a_peer_without_a_proof_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served(Engine()) as (server, (link,)):
        monkeypatch.setattr(replicas_end, "PROOF_S", 0.05)
        reader, writer = await asyncio.open_connection(LOOPBACK, server.port)
        with contextlib.suppress(ConnectionError):
            while await asyncio.wait_for(reader.read(1000), 60):
                pass
        writer.close()
        assert await link.call("echo", b"fine") == b"fine"


async def test_a_crowd_of_strangers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas_end, "MAX_UNPROVEN", 10)
    async with served(Engine()) as (server, (link,)):
        crowd = [socket.create_connection((LOOPBACK, server.port)) for _ in range(50)]
        await until(lambda: len(server.peers) == 11)
        new = await linked(server)  # the strangers keep no place from a router
        for known in (link, new):
            assert await known.call("echo", b"fine") == b"fine"
        new.lose(LostError("the test is over"))
        for each in crowd:
            each.close()
        await until(lambda: len(server.peers) == 1)


@pytest.mark.parametrize("kind", [MessageKind.BEGIN, MessageKind.CANCEL, MessageKind.CALL])
@both_ways
async def test_a_message_that_cannot_be_read_ends_its_connection_with_a_reason(
    kind: MessageKind, caplog: pytest.LogCaptureFixture, host: str
) -> None:
    async with served(Engine(), links=2, host=host) as (server, (link, other)):
        link.send(kind, b"\xc1")  # which is no msgpack
        await asyncio.wait([link.closed], timeout=5)
        assert await other.call("echo", b"fine") == b"fine"
        assert len(server.peers) == 1
    assert {(record.name, record.levelname) for record in caplog.records} == {
        ("kvroute.wire", "WARNING")
    }
    assert "cannot be read" in caplog.text


@given(st.binary(max_size=200), st.sampled_from([0, *MessageKind]), st.booleans())
def test_no_bytes_stop_a_replica(said: bytes, kind: int, is_proven: bool) -> None:
    """From a stranger, or from a router that has proven itself."""

    async def run() -> None:
        async with served(Engine()) as (server, (link,)):
            victim = await linked(server) if is_proven else None
            if victim is not None and victim.transport is not None:
                victim.transport.write(HEADER.pack(len(said), kind) + said)
            else:
                _, writer = await asyncio.open_connection(LOOPBACK, server.port)
                writer.write(said)
                writer.close()
            assert await asyncio.wait_for(link.call("echo", b"fine"), 60) == b"fine"
            if victim is not None:
                victim.lose(LostError("done"))

    asyncio.run(run())


@given(st.binary(max_size=200), st.sampled_from([0, *MessageKind]))
def test_no_bytes_stop_a_router(said: bytes, kind: int) -> None:
    """A connection may end, and says so."""

    async def run() -> None:
        engine = Engine()
        async with served(engine, links=2) as (server, (link, other)):
            stream = link.open(request(), max_waiting=MOST)
            await until(lambda: engine.running == 1)
            (peer,) = (peer for peer in server.peers if is_to(peer, link))
            assert peer.transport is not None
            peer.transport.write(HEADER.pack(len(said), kind) + said)
            await asyncio.sleep(0.01)
            await engine.steps(5)
            with contextlib.suppress(LostError, ValueError, FailedError):
                await asyncio.wait_for(read(stream), 60)
            assert await asyncio.wait_for(other.call("echo", b"fine"), 60) == b"fine"

    asyncio.run(run())


async def test_a_frame_of_many_chunks_lets_others_have_their_turns() -> None:
    link, many = Link("r", b"secret"), 5 * SLICE // 2
    streams = [Stream(link, number, MOST) for number in range(many)]
    link._streams |= dict(enumerate(streams))
    ended = [StreamEnded(number, "done") for number in range(many)]
    for token_id in (1, 2):
        first = [(number, chunk(token_id)) for number in range(many)]
        link.received(MessageKind.DELTAS, encode(Deltas(first, ended if token_id == 2 else [])))
    assert sum(bool(stream._chunks) for stream in streams) == SLICE
    for stream in streams:
        joined = await stream.next()
        assert joined
        rest = await stream.next()
        ids = joined.token_ids + (rest.token_ids if rest else ())
        assert ids == (1, 2)
        assert rest is None or await stream.next() is None
    assert not link.streams


async def test_nobody_listens_in_this_process_after_a_server_has_closed() -> None:
    async with served(Engine(), host=IN_PROCESS) as (server, _):
        assert server.port
    with pytest.raises(LostError, match="listens in this process"):
        await linked(server)


async def test_a_port_is_taken_from_the_range_or_the_error_says_which() -> None:
    with socket.create_server((LOOPBACK, 0)) as taken:
        port = taken.getsockname()[1]
        server = Server(Engine().generate, {}, max_requests=1)
        with pytest.raises(PortsTakenError, match=f"no port of {port}-{port} is free on"):
            await server.start(LOOPBACK, range(port, port + 1))
        await server.start(LOOPBACK, range(port, port + 50))
        assert port < server.port < port + 50
        await server.close()
