"""Background responses on a real Redis, with the routers' answers made by the test."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import pytest
from fastapi.responses import StreamingResponse
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from starlette.types import Receive, Scope, Send

from kvroute.contract.unreadable import Unreadable
from kvroute.features.gate import Caller
from kvroute.features.responses.background import (
    background_answers,
    background_responses,
    background_run,
)
from kvroute.features.responses.background.background_responses import BackgroundResponses
from kvroute.features.responses.background.events import Events, after
from kvroute.features.responses.stores.background_store import BackgroundStore, Record
from kvroute.features.responses.stores.leased_values import key, owner
from kvroute.router.api.calls import RESPONSES, Call, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.sessions import hints_of
from kvroute.router.api.urgency import urgency_of
from kvroute.store.keys import key_prefix
from tests.support.waiting import until

MB = 1 << 20
TEXT = [f"word{number} " for number in range(40)]
QUEUED = ["response.created", "response.queued"]  # the first events of a background response
EVENTS = len(QUEUED) + len(TEXT) + 1  # number of events of a whole response that runs once
CALLER = Caller("team", frozenset({"use"}), "salt", "secret")

# Headers of a request. Only those that a router reads are kept.
HEADERS = {
    "x-session-id": "s",
    "session-id": "codex",
    **dict.fromkeys(
        ("x-api-key", "authorization", "x-amzn-oidc-data", "x-goog-iap-jwt-assertion"), "secret"
    ),
}

Answer = Callable[[dict[str, Any], Send], Awaitable[None]]


def event(kind: str, number: int, **more: Any) -> bytes:
    told = json.dumps({"type": kind, "sequence_number": number, **more}, separators=(",", ":"))
    return f"event: {kind}\ndata: {told}\n\n".encode()


def events_of(id_: str, texts: Sequence[str] = TEXT, *, status: str = "completed") -> list[bytes]:
    """The events of a whole response."""
    shown = {"id": id_, "object": "response", "output": [], "background": True}
    deltas = [
        event("response.output_text.delta", 1 + number, delta=text)
        for number, text in enumerate(texts)
    ]
    ended = {**shown, "status": status, "output": ["".join(texts)]}
    return [
        event("response.created", 0, response={**shown, "status": "in_progress"}),
        *deltas,
        event("response.completed", len(texts) + 1, response=ended),
    ]


async def started(send: Send, status: int = 200, **headers: str) -> None:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": raw})


async def refused(send: Send, status: int, message: str, **headers: str) -> None:
    await started(send, status, **headers)
    body = json.dumps({"error": {"message": message, "code": "x"}}).encode()
    await send({"type": "http.response.body", "body": body})


async def when(is_true: Callable[[], Awaitable[bool]]) -> None:
    """Wait until the condition is true."""
    async with asyncio.timeout(60):
        while not await is_true():
            await asyncio.sleep(0.02)


class Router:
    """A router whose answers the test makes."""

    def __init__(self, client: Redis, name: str, answer: Answer, *, mb: int = 16) -> None:
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[bytes, bytes]] = []
        self.left = 0  # requests that were ended before their answer
        self.streams = 0  # streams that have begun
        self.store = BackgroundStore(
            client, unreadable=Unreadable(), limit_bytes=mb * MB, ttl_s=60, max_bytes=MB
        )
        self.service = BackgroundResponses(name, self.store)
        self.service.attach(self._application)
        self._answer = answer

    async def _application(self, scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["path"] == RESPONSES
        body = json.loads((await receive())["body"])
        self.requests.append(body)
        self.headers.append(dict(scope["headers"]))
        try:
            await self._answer(body, send)
        except asyncio.CancelledError:
            self.left += 1
            raise

    async def create(self, **body: Any) -> str:
        record = await self.service.create(asked(**body), HEADERS)
        return record.body(MB).id

    async def found(self, id_: str) -> Record:
        record = await self.service.find(id_, "")
        assert record is not None
        return record

    async def ended(self, id_: str) -> dict[str, Any]:
        """The response object after its end."""

        async def has_ended() -> bool:
            return not (await self.found(id_)).head.is_open

        await when(has_ended)
        shown = self.service.shown(await self.found(id_))
        return {name: json.loads(bytes(raw)) for name, raw in shown.items()}

    async def streamed(self, id_: str, number: int = -1) -> list[dict[str, Any]]:
        response = background_answers.events_of(
            self.service, await self.found(id_), number, every_s=0
        )
        self.streams += 1
        assert isinstance(response, StreamingResponse)
        data = [bytes(event).partition(b"data: ")[2] async for event in response.body_iterator]  # type: ignore[arg-type]
        return list(map(json.loads, data))


def asked(**body: Any) -> Call:
    return parse_call(RESPONSES, json.dumps({"input": "Hi", "background": True, **body}).encode())


async def whole(body: dict[str, Any], send: Send) -> None:
    await started(send)
    for each in events_of(body["request_id"]):
        await send({"type": "http.response.body", "body": each, "more_body": True})
        await asyncio.sleep(0)
    await send({"type": "http.response.body", "body": b""})


async def endless(body: dict[str, Any], send: Send) -> None:
    """Ten words, and then nothing."""
    await started(send)
    for each in events_of(body["request_id"])[:11]:
        await send({"type": "http.response.body", "body": each, "more_body": True})
    await asyncio.Event().wait()


@asynccontextmanager
async def running(*routers: Router) -> AsyncIterator[None]:
    for router in routers:
        router.service.start()
    try:
        yield
    finally:
        for router in routers:
            await router.service.stop()


@pytest.fixture(autouse=True)
def _short_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "WATCH_S", 0.05)
    monkeypatch.setattr(background_responses, "LEASE_S", 1.0)
    monkeypatch.setattr(background_responses, "POLL_S", 0.02)
    monkeypatch.setattr(background_run, "FLUSH_S", 0.05)
    monkeypatch.setattr(background_run, "BEAT_S", 0.2)
    monkeypatch.setattr(background_run, "AGAIN_S", 0.05)


async def test_it_runs_although_nobody_waits(empty_redis: Redis) -> None:
    one, other = Router(empty_redis, "one", whole), Router(empty_redis, "other", whole)
    async with running(one, other):
        id_ = await one.create(stream=False, store=True, temperature=0)
        shown = await other.ended(id_)
        assert shown["id"] == id_
        assert (shown["status"], shown["output"]) == ("completed", ["".join(TEXT)])
        (request,) = one.requests
        assert request["stream"] is True
        assert (request["request_id"], request["temperature"]) == (id_, 0)
        own = {b"host", b"content-type", b"content-length"}
        sent = {name: value for name, value in one.headers[0].items() if name not in own}
        assert sent == {b"x-session-id": b"s", b"session-id": b"codex"}
        assert await one.store.open() == {}
        assert one.service.ended["completed"] == 1


async def test_its_events_are_streamed_from_any_place(empty_redis: Redis) -> None:
    one, other = Router(empty_redis, "one", whole), Router(empty_redis, "other", whole)
    async with running(one, other):
        id_ = await one.create()
        events = await other.streamed(id_)
        assert [each["sequence_number"] for each in events] == list(range(EVENTS))
        first, second, third, *_ = events
        assert [each["type"] for each in (first, second)] == QUEUED
        assert first["response"] == second["response"]
        assert (first["response"]["status"], first["response"]["id"]) == ("queued", id_)
        assert third["type"] == "response.output_text.delta"  # the run's `response.created` is not
        assert "".join(each.get("delta", "") for each in events) == "".join(TEXT)
        for number in (0, 1, 17, EVENTS - 2, EVENTS - 1, 10_000):
            assert await one.streamed(id_, number) == events[number + 1 :]


async def test_many_clients_that_stream_it_ask_redis_like_one(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Router(empty_redis, "one", endless)
    reads, may_read = list[str](), asyncio.Event()
    for name in ("head", "events"):
        read = getattr(BackgroundStore, name)

        async def counted(*args: Any, name: str = name, read: Any = read) -> Any:
            reads.append(name)
            await may_read.wait()
            return await read(*args)

        monkeypatch.setattr(BackgroundStore, name, counted)
    id_ = await one.create()
    clients = [asyncio.create_task(one.streamed(id_)) for _ in range(100)]
    await until(lambda: reads)
    await until(lambda: one.streams == len(clients))
    for _ in range(100):  # all clients have their turns, and ask for the state of the response
        await asyncio.sleep(0)
    assert reads == ["head"]
    may_read.set()
    async with running(one):
        await when(lambda: _has_events(one, id_))
        await one.service.cancel(await one.found(id_))
        streams = await asyncio.gather(*clients)
    assert all(stream == streams[0] for stream in streams)
    assert 0 < reads.count("events") <= (await one.found(id_)).head.chunks


async def _has_events(router: Router, id_: str) -> bool:
    return (await router.found(id_)).head.chunks > 0


async def test_it_is_cancelled_at_any_router(empty_redis: Redis) -> None:
    one, other = Router(empty_redis, "one", endless), Router(empty_redis, "other", whole)
    async with running(one, other):
        id_ = await one.create()
        streaming = asyncio.create_task(other.streamed(id_))

        async def has_events() -> bool:
            return (await one.found(id_)).head.chunks > 0

        await when(has_events)
        cancelled = await other.service.cancel(await other.found(id_))
        assert cancelled.head.status == "cancelled"
        await until(lambda: one.left == 1)
        assert (await one.ended(id_))["status"] == "cancelled"
        *events, last = await streaming
        assert len(events) == 12
        assert (last["type"], last["sequence_number"]) == ("response.cancelled", 12)
        assert (last["response"]["id"], last["response"]["status"]) == (id_, "cancelled")
        assert await one.streamed(id_, 11) == [last]
        assert await one.streamed(id_, 12) == []
        again = await one.service.cancel(await one.found(id_))
        assert again.first == cancelled.first
        assert other.requests == []


async def test_one_that_has_ended_is_not_cancelled(empty_redis: Redis) -> None:
    one = Router(empty_redis, "one", whole)
    async with running(one):
        id_ = await one.create()
        await one.ended(id_)
        assert (await one.service.cancel(await one.found(id_))).head.status == "completed"


async def test_one_that_is_deleted_ends(empty_redis: Redis) -> None:
    one, other = Router(empty_redis, "one", endless), Router(empty_redis, "other", whole)
    async with running(one, other):
        id_ = await one.create()
        await until(lambda: len(one.requests) == 1)
        streaming = asyncio.create_task(one.streamed(id_))
        await until(lambda: one.service._heads._running)
        assert await other.service.delete(id_, "")
        await until(lambda: one.left == 1)
        last = (await streaming)[-1]
        assert (last["type"], last["code"]) == ("error", "not_found")
        assert await one.service.find(id_, "") is None
        assert not await one.service.delete(id_, "")


@pytest.mark.parametrize("is_killed", [False, True])
async def test_another_router_runs_it_when_its_own_stops_or_dies(
    empty_redis: Redis, is_killed: bool
) -> None:
    one, other = Router(empty_redis, "one", endless), Router(empty_redis, "other", whole)
    async with running(other):
        one.service.start()
        id_ = await one.create()

        async def has_events() -> bool:
            return (await one.found(id_)).head.events == 12

        await when(has_events)
        if is_killed:
            for task in (*one.service.running, *(each for _, each in one.service._runs.values())):
                task.cancel()
        else:
            await one.service.stop()
        shown = await other.ended(id_)
        assert (shown["status"], shown["output"]) == ("completed", ["".join(TEXT)])
        events = await other.streamed(id_)
        numbers = [each["sequence_number"] for each in events]
        assert numbers == list(range(12 + len(TEXT) + 2))
        # A client that has read everything of the first run gets everything of the second one.
        assert events[12]["type"] == "response.created"
        assert "".join(each.get("delta", "") for each in events[12:]) == "".join(TEXT)
        assert (await other.found(id_)).head.attempts == 2


async def test_a_router_that_stops_stays_healthy_while_its_answers_end(empty_redis: Redis) -> None:
    """Ray Serve ends a router at once when its health check fails."""
    one = Router(empty_redis, "one", whole)
    one.service.start()
    await one.service.stop()
    await asyncio.sleep(0)
    one.service.check()


async def test_a_busy_cluster_is_asked_again(empty_redis: Redis) -> None:
    async def first_busy(body: dict[str, Any], send: Send) -> None:
        if len(one.requests) < 3:
            await refused(send, (429, 503)[len(one.requests) % 2], "busy", retry_after="0")
        else:
            await whole(body, send)

    one = Router(empty_redis, "one", first_busy)
    async with running(one):
        assert (await one.ended(await one.create()))["status"] == "completed"
        assert len(one.requests) == 3


async def test_a_clock_that_jumps_fails_none_that_waits(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s = time.time()

    async def first_busy(body: dict[str, Any], send: Send) -> None:
        if len(one.requests) < 2:
            monkeypatch.setattr(time, "time", lambda: now_s + 86_400)
            await refused(send, 503, "busy", retry_after="0")
        else:
            await whole(body, send)

    one = Router(empty_redis, "one", first_busy)
    async with running(one):
        assert (await one.ended(await one.create()))["status"] == "completed"


async def test_one_that_is_refused_fails_with_the_reason(empty_redis: Redis) -> None:
    async def never(body: dict[str, Any], send: Send) -> None:
        await refused(send, 400, "temperature is hot")

    one = Router(empty_redis, "one", never)
    async with running(one):
        id_ = await one.create()
        shown = await one.ended(id_)
        assert shown["status"] == "failed"
        assert shown["error"] == {"code": "invalid_prompt", "message": "temperature is hot"}
        *first, told = await one.streamed(id_)
        assert [each["type"] for each in first] == QUEUED
        assert (told["type"], told["response"]["status"]) == ("response.failed", "failed")
        assert len(one.requests) == 1


async def test_one_that_breaks_fails_with_the_error_in_its_stream(empty_redis: Redis) -> None:
    async def broken(body: dict[str, Any], send: Send) -> None:
        await started(send)
        data = b"".join(events_of(body["request_id"])[:5])
        data += event("error", 5, message="all replicas have died", code="replicas_died")
        await send({"type": "http.response.body", "body": data})

    one = Router(empty_redis, "one", broken)
    async with running(one):
        id_ = await one.create()
        shown = await one.ended(id_)
        assert shown["error"] == {"code": "server_error", "message": "all replicas have died"}
        assert [each["sequence_number"] for each in await one.streamed(id_)] == list(range(8))


async def test_one_that_no_router_survives_is_given_up(empty_redis: Redis) -> None:
    one = Router(empty_redis, "one", endless)
    id_ = await one.create()
    record = await one.found(id_)
    head = replace(record.head, attempts=background_responses.MAX_ATTEMPTS, beats=9)
    await one.service.stop()
    await one.store.replace(await one.found(id_), replace(head, router=""))
    other = Router(empty_redis, "other", whole)
    async with running(other):
        shown = await other.ended(id_)
        assert (shown["status"], shown["error"]["code"]) == ("failed", "server_error")
        assert other.requests == []
        *first, told = await other.streamed(id_)
        assert [each["type"] for each in first] == QUEUED
        assert (told["type"], told["sequence_number"]) == ("response.failed", 2)
        assert told["response"]["error"]["message"] == background_responses.GIVEN_UP


@pytest.mark.parametrize(
    ("is_flushed", "said"), [(True, "Redis has lost its data"), (False, "Redis is away (gone)")]
)
async def test_a_stream_that_ends_too_early_ends_with_the_cause(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch, is_flushed: bool, said: str
) -> None:
    async def away(*_: object) -> None:
        raise RedisConnectionError("gone")

    one, other = Router(empty_redis, "one", endless), Router(empty_redis, "other", whole)
    async with running(one):
        id_ = await one.create()
        await when(lambda: _has_events(one, id_))
        streaming = asyncio.create_task(other.streamed(id_))
        await until(lambda: other.service._heads._running)
        if is_flushed:
            await empty_redis.flushall()
        else:
            monkeypatch.setattr(other.store, "head", away)
        *events, last = await streaming
        assert [each["sequence_number"] for each in events] == list(range(12))
        # A client that asks for the events after this one gets all that it does not have.
        assert (last["type"], last["sequence_number"]) == ("error", 11)
        assert said in last["message"]


async def slowly(body: dict[str, Any], send: Send) -> None:
    """The whole answer, over many writes to Redis."""
    await started(send)
    for each in events_of(body["request_id"]):
        await send({"type": "http.response.body", "body": each, "more_body": True})
        await asyncio.sleep(0.02)


async def assert_each_event_comes_once(one: "Router") -> None:
    """Run a response in the background, and assert that its stream is complete."""
    async with running(one):
        id_ = await one.create()
        assert (await one.ended(id_))["status"] == "completed"
        numbers = [each["sequence_number"] for each in await one.streamed(id_)]
        assert numbers == list(range(EVENTS))
        assert len(one.requests) == 1


@pytest.mark.parametrize("is_done", [False, True])
async def test_events_are_complete_although_redis_fails_now_and_then(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch, is_done: bool
) -> None:
    """A write that fails may have been done, if only its reply is lost."""
    one = Router(empty_redis, "one", slowly)
    replace_record, calls = one.store.replace, 0

    async def failing(*given: Any) -> Record | None:
        nonlocal calls
        calls += 1
        written = await replace_record(*given) if is_done or not calls % 2 else None
        if calls % 2:
            raise RedisConnectionError("away")
        return written

    monkeypatch.setattr(one.store, "replace", failing)
    await assert_each_event_comes_once(one)


async def test_an_answer_that_ends_while_its_events_are_written_is_written_once(
    empty_redis: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = Router(empty_redis, "one", slowly)
    replace_record = one.store.replace

    async def slow(*given: Any) -> Record | None:
        written = await replace_record(*given)
        await asyncio.sleep(0.3)
        return written

    monkeypatch.setattr(one.store, "replace", slow)
    await assert_each_event_comes_once(one)


async def test_an_answer_that_is_too_large_fails(empty_redis: Redis) -> None:
    noise = [f"{hash(str(number)):x}" for number in range(20_000)]

    async def large(body: dict[str, Any], send: Send) -> None:
        await started(send)
        data = b"".join(events_of(body["request_id"], noise)[-1:])
        await send({"type": "http.response.body", "body": data})

    one = Router(empty_redis, "one", large, mb=2)
    async with running(one):
        shown = await one.ended(await one.create())
        assert shown["status"] == "failed"
        assert "--response-store-mb" in shown["error"]["message"]


async def test_too_many_are_refused(empty_redis: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background_responses, "MAX_OPEN", 4)
    monkeypatch.setattr(background_responses, "MAX_OPEN_OF_TENANT", 2)
    one = Router(empty_redis, "one", endless)
    async with running(one):
        for _ in range(2):
            await one.service.create(asked().with_caller(CALLER), {})
        with pytest.raises(ApiError, match="2 background responses"):
            await one.service.create(asked().with_caller(CALLER), {})
        ids = [await one.create() for _ in range(2)]
        with pytest.raises(ApiError, match="4 background responses") as error:
            await one.create()
        assert (error.value.status, error.value.code) == (429, "overloaded")
        await one.service.cancel(await one.found(ids[0]))
        await one.create()


async def test_a_full_redis_loses_no_answer_and_says_so(empty_redis: Redis) -> None:
    one, may_end = Router(empty_redis, "one", whole), asyncio.Event()

    async def waiting(body: dict[str, Any], send: Send) -> None:
        await may_end.wait()
        await whole(body, send)

    one._answer = waiting
    async with running(one):
        id_ = await one.create()
        await empty_redis.config_set("maxmemory", "1")
        try:
            may_end.set()
            with pytest.raises(ApiError, match="raise the maxmemory of Redis"):
                await one.create()
        finally:
            await empty_redis.config_set("maxmemory", "0")
        assert (await one.ended(id_))["output"] == ["".join(TEXT)]


async def test_one_that_cannot_be_read_is_counted(empty_redis: Redis) -> None:
    router = Router(empty_redis, "r", whole)
    id_ = await router.create()
    await empty_redis.hset(f"{key_prefix('default', '')}:background", key(id_, ""), b"x")
    assert await router.service.find(id_, "") is None
    assert router.store.unreadable.counts["response"] == 1
    await router.service.stop()


async def test_it_is_found_by_its_owner_only(empty_redis: Redis) -> None:
    one = Router(empty_redis, "one", whole)
    async with running(one):
        record = await one.service.create(asked(cache_salt="own").with_caller(CALLER), {})
        id_ = record.body(MB).id
        assert await one.service.find(id_, owner(CALLER, "own")) is not None
        for salt in ("", "own", owner(CALLER, "")):
            assert await one.service.find(id_, salt) is None


class Noting(dict[str, str]):
    """Headers that note which names are read."""

    def __init__(self) -> None:
        self.read = set[str]()

    def get(self, name: str, *otherwise: Any) -> Any:
        self.read.add(name)
        return super().get(name, *otherwise)


def test_all_headers_that_a_router_reads_are_kept() -> None:
    headers = Noting()
    hints_of(headers, asked())
    urgency_of(headers, {}, CALLER, max_wait_s=0)
    assert len(headers.read) > 10
    assert headers.read <= {*background_responses.KEPT_HEADERS}


def test_an_incomplete_response_is_one_although_its_last_event_is_called_completed() -> None:
    events = Events(0)
    events.add(b"".join(events_of("resp_1", status="incomplete")))
    assert events.status == "incomplete"


@given(cuts=st.lists(st.integers(0, 4000), max_size=20), first=st.integers(0, 1000))
def test_events_are_the_same_however_they_are_cut(cuts: list[int], first: int) -> None:
    data = b"".join(events_of("resp_1")) + b": a comment\n\ndata: [DONE]\n\n"
    places = [0, *sorted(cut for cut in cuts if cut < len(data)), len(data)]
    events = Events(first)
    for start, end in pairwise(places):
        events.add(data[start:end])
    taken = events.taken()
    found = list(after(taken, first - 1))
    told = [json.loads(each.partition(b"data: ")[2]) for each in found]
    assert [each["sequence_number"] for each in told] == list(range(first, events.next))
    assert events.next == first + len(TEXT) + 2
    assert events.status == "completed"
    assert b"a comment" not in taken
