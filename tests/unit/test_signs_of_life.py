"""A stream that waits gets signs of life, and ends in the format of its API."""

import asyncio
from collections.abc import AsyncIterator
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.features.gate import OPEN
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, response
from kvroute.router.endpoints import openai_routes
from kvroute.router.endpoints.signs_of_life import COMMENT, PING, with_signs_of_life
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.models import Models
from tests.support.waiting import until
from tests.support.without_features import WithoutFeatures

CHATS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
USER: Any = {"role": "user", "content": "Hi"}
HEAD = "text/event-stream; charset=utf-8"
CHUNK = (
    b'data: {"id":"1","object":"chat.completion.chunk","created":1,"model":"m",'
    b'"choices":[{"index":0,"delta":{"content":"Hello"}}]}\n\ndata: [DONE]\n\n'
)
MESSAGE = (
    b'event: message_start\ndata: {"type":"message_start","message":{"id":"1","type":"message",'
    b'"role":"assistant","content":[],"model":"m","stop_reason":null,"stop_sequence":null,'
    b'"usage":{"input_tokens":1,"output_tokens":0}}}\n\n'
    b'event: content_block_start\ndata: {"type":"content_block_start","index":0,'
    b'"content_block":{"type":"text","text":""}}\n\n'
    b'event: content_block_delta\ndata: {"type":"content_block_delta","index":0,'
    b'"delta":{"type":"text_delta","text":"Hello"}}\n\n'
    b'event: content_block_stop\ndata: {"type":"content_block_stop","index":0}\n\n'
    b'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn",'
    b'"stop_sequence":null},"usage":{"output_tokens":1}}\n\n'
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
)
TOO_LATE = ApiError(429, "has waited 600 s", code="wait_too_long")


class Model(WithoutFeatures):
    """A model that answers with `result`, as soon as the client has got so many signs of life."""

    def __init__(self, signs: int, result: Response | ApiError, *, keep_alive_s: float = 0.01):
        self.name = "m"
        self.settings = SimpleNamespace(adapters=[], max_wait_s=0.0, keep_alive_s=keep_alive_s)
        self.errors: list[Exception] = []
        self.requests = self.telemetry = self
        self.sent = 0  # signs of life that the client has got
        self._signs, self._result = signs, result

    def variant(self, name: str | None, tenant: str = "") -> str | None:
        return "" if name in (None, "m") else None

    async def answer(self, call: Any, context: RequestContext, *_: Any) -> Response:
        if call.body.get("stream"):
            await until(lambda: self.sent >= self._signs)
        if isinstance(self._result, ApiError):
            raise self._result
        return self._result

    def refused(self, error: Exception) -> None:
        self.errors.append(error)


class Counting:
    """An ASGI application that counts the signs of life of the application behind it."""

    def __init__(self, application: ASGIApp, model: Model) -> None:
        self._application, self._model = application, model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def counted(message: Message) -> None:
            await send(message)
            self._model.sent += message.get("body", b"") in (PING, COMMENT)

        await self._application(scope, receive, counted)


def served(model: Model) -> httpx2.AsyncClient:
    http = FastAPI()
    models = object.__new__(Models)
    models.all = [model]  # type: ignore[list-item]
    models.first = model  # type: ignore[assignment]
    models._started = 0
    http.state.models = models
    http.state.bodies = Bodies(limit_mb=1)
    http.state.gate = OPEN
    http.include_router(openai_routes.routes)

    async def refuse(request: Any, error: Any) -> Response:
        return response(error, path=request.url.path)

    http.exception_handler(ApiError)(refuse)
    transport = httpx2.ASGITransport(Counting(http, model))
    return httpx2.AsyncClient(transport=transport, base_url="http://kvroute")


def openais(model: Model) -> openai.AsyncOpenAI:
    url = "http://kvroute/v1"
    return openai.AsyncOpenAI(
        api_key="none", base_url=url, http_client=served(model), max_retries=0
    )


def anthropics(model: Model) -> anthropic.AsyncAnthropic:
    url = "http://kvroute"
    return anthropic.AsyncAnthropic(
        api_key="none", base_url=url, http_client=served(model), max_retries=0
    )


def stream(data: bytes) -> Response:
    async def parts() -> Any:
        yield data

    return StreamingResponse(parts(), headers={"x-kvroute-replica": "0"}, media_type=HEAD)


async def posted(model: Model, path: str, **body: Any) -> httpx2.Response:
    async with served(model) as client:
        return await client.post(path, json={"model": "m", "max_tokens": 1, **body})


@pytest.mark.parametrize(
    ("path", "sign"), [(CHATS, COMMENT), (RESPONSES, COMMENT), (MESSAGES, PING)]
)
async def test_signs_of_life_come_before_the_stream(path: str, sign: bytes) -> None:
    body = {"input": "Hi"} if path == RESPONSES else {"messages": [USER]}
    found = await posted(Model(2, stream(b"data: 1\n\n")), path, stream=True, **body)
    assert (found.status_code, found.headers["content-type"]) == (200, HEAD)
    assert "x-kvroute-replica" not in found.headers, "it is not known before the wait"
    before, _, last = found.content.rpartition(sign)
    assert (before.replace(sign, b""), last) == (b"", b"data: 1\n\n")
    assert before


@pytest.mark.parametrize("keep_alive_s", [0.0, 60.0])
async def test_without_a_long_wait_the_response_has_its_own_headers(keep_alive_s: float) -> None:
    model = Model(0, stream(b"data: 1\n\n"), keep_alive_s=keep_alive_s)
    found = await posted(model, CHATS, stream=True, messages=[USER])
    assert (found.headers["x-kvroute-replica"], found.text) == ("0", "data: 1\n\n")
    refusing = Model(0, TOO_LATE, keep_alive_s=keep_alive_s)
    refused = await posted(refusing, CHATS, stream=True, messages=[USER])
    assert refused.status_code == 429


async def test_a_response_that_is_not_a_stream_waits_in_silence() -> None:
    model = Model(2, JSONResponse({"id": "1"}), keep_alive_s=1e-9)
    found = await posted(model, CHATS, messages=[USER])
    assert (found.json(), model.sent) == ({"id": "1"}, 0)


async def test_events_that_come_rarely_have_signs_of_life_between_them() -> None:
    came = asyncio.Event()

    async def events() -> AsyncIterator[bytes]:
        for each in (b"1", b"2"):
            yield each
            came.clear()
            await came.wait()

    found = []
    async for part in with_signs_of_life(events(), path=RESPONSES, every_s=0.01):
        found.append(part)
        if found[-2:] == [COMMENT, COMMENT]:
            came.set()
    assert [part for part, _ in groupby(found)] == [b"1", COMMENT, b"2", COMMENT]
    assert [each async for each in with_signs_of_life(one(), path=MESSAGES, every_s=0)] == [b"1"]


async def one() -> AsyncIterator[bytes]:
    yield b"1"


async def test_openais_client_streams_through_a_wait() -> None:
    chat = openais(Model(2, stream(CHUNK))).chat.completions
    chunks = await chat.create(model="m", messages=[USER], stream=True)
    assert [chunk.choices[0].delta.content async for chunk in chunks] == ["Hello"]


async def test_anthropics_client_streams_through_a_wait() -> None:
    messages = anthropics(Model(2, stream(MESSAGE))).messages
    async with messages.stream(model="m", messages=[USER], max_tokens=1) as events:
        assert [text async for text in events.text_stream] == ["Hello"]
        assert (await events.get_final_message()).stop_reason == "end_turn"


REFUSAL = {"error": {"message": "no such tool", "type": "invalid_request_error", "code": "bad"}}


@pytest.mark.parametrize(
    ("result", "message"),
    [(TOO_LATE, "has waited 600 s"), (JSONResponse(REFUSAL, 400), "no such tool")],
)
async def test_an_error_after_a_sign_of_life_is_an_event_that_clients_raise(
    result: Response | ApiError, message: str
) -> None:
    chat = openais(Model(1, result)).chat.completions
    chunks = await chat.create(model="m", messages=[USER], stream=True)
    with pytest.raises(openai.APIError, match=message):
        [chunk async for chunk in chunks]
    messages = anthropics(Model(1, result)).messages
    with pytest.raises(anthropic.APIError, match=message):
        async with messages.stream(model="m", messages=[USER], max_tokens=1) as events:
            await events.get_final_message()
    responses = openais(Model(1, result)).responses
    found = [each async for each in await responses.create(model="m", input="Hi", stream=True)]
    assert [(each.type, getattr(each, "message", "")) for each in found] == [("error", message)]


async def test_an_error_after_a_sign_of_life_is_counted_like_other_errors() -> None:
    model = Model(1, TOO_LATE)
    await posted(model, CHATS, stream=True, messages=[USER])
    assert model.errors == [TOO_LATE]
