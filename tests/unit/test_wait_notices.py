"""A stream that waits for a seat sends notices, and ends in the format of its API."""

from types import SimpleNamespace
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse, StreamingResponse

from kvroute.features.gate import OPEN
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.errors import ApiError, response
from kvroute.router.endpoints import openai_routes
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.models import Models
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
    """A model whose requests wait for a seat for `notices` notices, and then get `result`."""

    def __init__(self, notices: int, result: Response | ApiError) -> None:
        self.name = "m"
        self.settings = SimpleNamespace(adapters=[], max_wait_s=0.0)
        self.errors: list[Exception] = []
        self.requests = self.telemetry = self
        self._notices, self._result = notices, result

    def variant(self, name: str | None, tenant: str = "") -> str | None:
        return "" if name in (None, "m") else None

    async def answer(self, call: Any, context: RequestContext, *_: Any) -> Response:
        if context.still_waiting is not None:
            for _notice in range(self._notices):
                await context.still_waiting("waiting for a seat")
        if isinstance(self._result, ApiError):
            raise self._result
        return self._result

    def refused(self, error: Exception) -> None:
        self.errors.append(error)


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
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(http), base_url="http://kvroute")


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
    ("path", "notice"),
    [
        (CHATS, ": waiting for a seat\n\n"),
        (RESPONSES, ": waiting for a seat\n\n"),
        (MESSAGES, 'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
async def test_notices_come_before_the_stream(path: str, notice: str) -> None:
    body = {"input": "Hi"} if path == RESPONSES else {"messages": [USER]}
    found = await posted(Model(2, stream(b"data: 1\n\n")), path, stream=True, **body)
    assert (found.status_code, found.headers["content-type"]) == (200, HEAD)
    assert "x-kvroute-replica" not in found.headers, "it is not known before the wait"
    assert found.text == 2 * notice + "data: 1\n\n"


async def test_without_a_long_wait_the_response_has_its_own_headers() -> None:
    found = await posted(Model(0, stream(b"data: 1\n\n")), CHATS, stream=True, messages=[USER])
    assert (found.headers["x-kvroute-replica"], found.text) == ("0", "data: 1\n\n")
    refused = await posted(Model(0, TOO_LATE), CHATS, stream=True, messages=[USER])
    assert refused.status_code == 429


async def test_a_response_that_is_not_a_stream_waits_without_notices() -> None:
    found = await posted(Model(2, JSONResponse({"id": "1"})), CHATS, messages=[USER])
    assert found.json() == {"id": "1"}


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
async def test_an_error_after_a_notice_is_an_event_that_clients_raise(
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


async def test_an_error_after_a_notice_is_counted_like_other_errors() -> None:
    model = Model(1, TOO_LATE)
    await posted(model, CHATS, stream=True, messages=[USER])
    assert model.errors == [TOO_LATE]
