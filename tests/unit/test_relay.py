"""A call's response is forwarded as replicas write it, even if replicas are lost."""

import asyncio
import json
import random
import time
from functools import partial
from typing import Any

import numpy as np
import pytest
from msgspec.json import encode
from starlette.responses import Response
from starlette.types import Message

from kvroute.contract.generation import Chunk, Emit, EngineDeadError, GenerateRequest
from kvroute.contract.http_call import HttpCall, HttpPart
from kvroute.router.api.calls import Call
from kvroute.router.api.errors import ApiError, event
from kvroute.router.dispatch import dispatcher
from kvroute.router.dispatch.batch import merge_bodies
from kvroute.router.dispatch.generation import Generation, StartPrompt
from kvroute.router.dispatch.replica_errors import failure_event, replica_error
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.serving.responding import written
from tests.support.wired import Wired, dispatcher_of

TOKENS = 12
DONE = b"data: [DONE]\n\n"
IMMORTAL = -1
DEAD = EngineDeadError("as planned")


class Applications:
    """In the place of vLLM's: each answers with the numbers of its tokens. The first that is asked
    dies after lives[0] chunks, and so on."""

    def __init__(
        self,
        *lives: int,
        can_continue: bool = True,
        status: int = 200,
        death: Exception = DEAD,
        tokens: int = TOKENS,
    ) -> None:
        self.requests: list[GenerateRequest] = []
        self.tokens = tokens
        self.status = status
        self.ended = asyncio.Event()  # one of them has answered
        self._lives = lives
        self._can_continue = can_continue
        self._death = death

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        self.requests.append(request)
        call, life = request.call, self._lives[len(self.requests) - 1]
        assert call is not None
        assert sum(call.deltas) == request.answered
        status, stream = self.status, json.loads(call.body)["stream"]
        kind = "text/event-stream" if stream else "application/json"
        if status != 200:
            part = HttpPart(b'{"error": "no"}', status, "application/json")
            emit(Chunk((), 0, is_last=True, http=part))
            return
        for number in range(request.answered, self.tokens):
            await asyncio.sleep(0)
            if life == 0:
                raise self._death
            life -= 1
            is_last = number == self.tokens - 1
            data = event_of(number) if stream else b""
            if is_last:
                data = data + usage(self.tokens) + DONE if stream else whole(self.tokens)
            has_head = number == 0 if stream else is_last
            part = HttpPart(
                data,
                status if has_head else 0,
                kind if has_head else "",
                (1,),
                can_continue=self._can_continue,
            )
            emit(Chunk((number,), 7, is_last, part))
        self.ended.set()

    async def start_after_an_answer(self, start: StartPrompt) -> Generation:
        """Start a prompt when another one's answer is complete, as if there was one place."""
        await self.ended.wait()
        return await start()


def event_of(number: int, index: int = 0) -> bytes:
    choice = {"index": index, "text": f" {number}"}
    return b"data: " + json.dumps({"choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"


def usage(tokens: int = TOKENS) -> bytes:
    counts = {"choices": [], "usage": {"completion_tokens": tokens}}
    return b"data: " + json.dumps(counts, separators=(",", ":")).encode() + b"\n\n"


def whole(tokens: int = TOKENS) -> bytes:
    text = "".join(f" {number}" for number in range(tokens))
    choices = [{"index": 0, "text": text}]
    return json.dumps({"choices": choices, "usage": {"completion_tokens": tokens}}).encode()


STREAM = b"".join(map(event_of, range(TOKENS))) + usage() + DONE
COMPLETION = Call("/v1/completions", b"", {})
LONG = 1000  # tokens of an answer that is longer than what may wait for a client


async def ask(
    apps: Applications, *, stream: bool = True, prompts: int = 1, has_one_place: bool = False
) -> Response:
    """Send a call through a dispatcher, and read the response to its end."""
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    wired = Wired({f"r{number}": apps.generate for number in range(len(apps._lives))})
    call = HttpCall("/v1/completions", json.dumps({"stream": stream}).encode(), 1.0)
    context = RequestContext(time.monotonic(), "id", prompts=prompts)
    asked = [(np.arange(9, dtype=np.uint32) + n, call) for n in range(prompts)]
    starts = [*dispatcher_of(wired, fleet).starters(asked, context)]
    if has_one_place:
        starts[1:] = [partial(apps.start_after_an_answer, start) for start in starts[1:]]
    async with wired:
        response = await written(COMPLETION, starts, prompts=prompts, policy="")
        await _read(response)
    return response


def message_of(response: Response) -> object:
    return json.loads(bytes(response.body))["error"]["message"]


async def _read(response: Response) -> None:
    """Read a response, streamed or not, into `response.body`."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        raise AssertionError("nobody leaves")

    scope = {"type": "http", "asgi": {"spec_version": "2.4"}}
    await response(scope, receive, send)
    response.body = b"".join(message.get("body", b"") for message in sent)


@pytest.mark.parametrize("lives", [[IMMORTAL], [1], [5], [TOKENS - 1], [0]])
@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_a_response_is_the_same_when_replicas_are_lost(
    lives: list[int], stream: bool
) -> None:
    apps = Applications(*lives, IMMORTAL)
    response = await ask(apps, stream=stream)
    assert response.body == (STREAM if stream else whole())
    assert len(apps.requests) == len(lives) + (lives != [IMMORTAL])


async def test_the_next_replica_gets_what_the_first_one_has_sent() -> None:
    apps = Applications(5, IMMORTAL)
    await ask(apps)
    first, second = apps.requests
    assert first.call
    assert second.call
    assert (first.call.deltas, second.call.deltas) == ((), (1,) * 5)
    assert second.call.cached_tokens == 7
    assert (second.call.created, second.call.body) == (first.call.created, first.call.body)
    assert second.request_id == first.request_id  # the ids in the response depend on it


async def test_a_response_that_cannot_be_continued_starts_again_if_nothing_was_sent() -> None:
    apps = Applications(5, IMMORTAL, can_continue=False)
    assert (await ask(apps, stream=False)).body == whole()
    assert apps.requests[1].answered == 0
    streamed = await ask(Applications(5, IMMORTAL, can_continue=False))
    assert bytes(streamed.body).startswith(event_of(0))
    assert b"was lost while it answered" in streamed.body


async def test_a_refusal_of_a_replica_keeps_its_status() -> None:
    for stream in (True, False):
        response = await ask(Applications(IMMORTAL, status=422), stream=stream)
        assert (response.status_code, message_of(response)) == (422, "no")


async def test_a_replica_that_fails_during_a_stream_ends_it_with_an_error() -> None:
    """The request may fail on every replica, so no other replica continues it."""
    apps = Applications(3, death=RuntimeError("a bug"))
    *_, last, done, end = bytes((await ask(apps)).body).split(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (error["type"], done, end) == ("server_error", DONE.strip(), b"")
    assert "a bug" not in error["message"]


async def test_several_prompts_make_one_stream() -> None:
    response = await ask(Applications(*[IMMORTAL] * 3), prompts=3)
    *events, last, done, end = bytes(response.body).split(b"\n\n")
    assert (done, end) == (DONE.strip(), b"")
    assert last + b"\n\n" == usage(3 * TOKENS)
    for index in range(3):
        own = [each + b"\n\n" for each in events if b'"index":%d' % index in each]
        assert own == [event_of(number, index) for number in range(TOKENS)]


async def test_several_prompts_make_one_body() -> None:
    response = await ask(Applications(*[IMMORTAL] * 3), stream=False, prompts=3)
    body = json.loads(bytes(response.body))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2]
    assert body["usage"] == {"completion_tokens": 3 * TOKENS}


async def test_the_refusal_of_one_prompt_is_the_response_to_all() -> None:
    response = await ask(Applications(*[IMMORTAL] * 3, status=400), prompts=3)
    assert (response.status_code, message_of(response)) == (400, "no")


async def test_a_call_with_several_prompts_survives_a_lost_replica() -> None:
    response = await ask(Applications(4, *[IMMORTAL] * 3), stream=False, prompts=3)
    assert json.loads(bytes(response.body))["usage"] == {"completion_tokens": 3 * TOKENS}


@pytest.mark.parametrize("stream", [True, False], ids=["streamed", "whole"])
async def test_answers_are_read_while_further_prompts_of_their_call_wait(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("MIN_TOKENS", "WAITING_TOKENS"):
        monkeypatch.setattr(dispatcher, limit, LONG // 4)
    apps = Applications(*[IMMORTAL] * 3, tokens=LONG)
    response = await ask(apps, stream=stream, prompts=3, has_one_place=True)
    body = bytes(response.body)
    assert json.dumps({"completion_tokens": 3 * LONG}).encode() in body.replace(b":", b": ")
    assert b"error" not in body


@pytest.mark.parametrize(("status", "message"), [(400, "no"), (200, "a replica failed")])
async def test_a_prompt_that_fails_after_the_stream_has_begun_ends_it_with_an_error(
    status: int, message: str
) -> None:
    apps = Applications(IMMORTAL, 0, tokens=LONG, death=RuntimeError("a bug"))
    asking = asyncio.create_task(ask(apps, prompts=2, has_one_place=True))
    await apps.ended.wait()
    apps.status = status
    *events, last, done, end = bytes((await asking).body).split(b"\n\n")
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert (len(events), done, end) == (LONG, DONE.strip(), b"")
    assert error["message"].startswith(message)


async def test_choices_of_several_prompts_have_consecutive_indexes() -> None:
    choices = [{"index": 0}, {"index": 1}]
    counts: dict[str, Any] = {"total": 2, "details": {"cached": 1, "other": None}}
    each = json.dumps({"choices": choices, "usage": counts}).encode()
    body = json.loads(encode(await merge_bodies([each] * 2, n=2)))
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    assert body["usage"] == {"total": 4, "details": {"cached": 2, "other": None}}


def test_an_event_of_an_error_has_the_shape_of_its_route() -> None:
    error = ApiError(503, "gone")
    chat, end = event(error, b"", path="/v1/chat/completions").split(b"\n\n", 1)
    assert json.loads(chat.removeprefix(b"data: "))["error"]["message"] == "gone"
    assert end == b"data: [DONE]\n\n"
    name, data = event(error, b"", path="/v1/messages").split(b"\n", 1)
    assert name == b"event: error"
    said = json.loads(data.removeprefix(b"data: "))
    assert said == {"type": "error", "error": {"type": "overloaded_error", "message": "gone"}}
    before = b'event: x\ndata: {"sequence_number":6}\n\nevent: y\ndata: {"sequence_number":7}\n\n'
    name, data = event(error, before, path="/v1/responses").split(b"\n", 1)
    assert name == b"event: error"
    assert json.loads(data.removeprefix(b"data: ")) == {
        "type": "error",
        "code": "unavailable",
        "message": "gone",
        "param": None,
        "sequence_number": 8,
    }


def test_an_error_of_a_replica_has_the_types_of_its_routes_api() -> None:
    found = b'{"type":"error","error":{"type":"BadRequestError","message":"no"}}'
    assert json.loads(replica_error(found, 400, path="/v1/messages")) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "no"},
    }
    assert json.loads(replica_error(found, 400, path="/v1/responses"))["error"] == {
        "type": "invalid_request_error",
        "message": "no",
        "param": None,
        "code": "invalid_value",
    }
    for data in (b"no JSON", b"[" * 100_000):
        shapeless = json.loads(replica_error(data, 500, path="/v1/completions"))["error"]
        assert shapeless["message"].startswith(data.decode()[:5])
        assert shapeless["code"] == "server_error"


@pytest.mark.parametrize(
    ("message", "param", "code", "expected"),
    [
        (
            "1 validation error:\n  {'type': 'float_parsing', 'loc': 'body.temperature', "
            "'msg': 'Input should be a valid number', 'input': 'hot'}",
            "temperature",
            "invalid_value",
            "temperature is hot; expected a valid number",
        ),
        (
            "2 validation errors:\n  {'type': 'string_type', 'loc': 'body.stop', 'msg': 'Input "
            "should be a valid string', 'input': '5'}\n  {'type': 'list_type', 'loc': 'body.stop', "
            "'msg': 'Input should be a valid list', 'input': '5'}",
            "stop",
            "invalid_value",
            "stop is 5; expected a valid string, or expected a valid list",
        ),
        (
            "1 validation error:\n  {'type': 'value_error', 'loc': 'body.max_tokens', 'msg': "
            "'Value error, max_tokens must be positive', 'input': '0', "
            "'ctx': {'error': ValueError('max_tokens must be positive')}}",
            "max_tokens",
            "invalid_value",
            "max_tokens is 0; max_tokens must be positive",
        ),
        (
            "1 validation error:\n  {'type': 'missing', 'loc': 'body.tools.0.FunctionTool.name', "
            "'msg': 'Field required', 'input': '<dict of 2 items>'}",
            "tools.0.name",
            "invalid_value",
            "tools.0.name is missing",
        ),
        (
            "2 validation errors for ValidatorIterator\n0.TextParam.type\n  Input should be 'text' "
            "[type=literal_error, input_value='x']\n    For further information visit a page",
            "messages",
            "invalid_value",
            "the content of a message is not valid: 0.type is x; expected 'text'",
        ),
        (
            "This model's maximum context length is 8 tokens. (parameter=input_tokens, value=9)",
            "prompt",
            "context_length_exceeded",
            "This model's maximum context length is 8 tokens.",
        ),
    ],
)
def test_an_error_of_vllm_is_said_in_our_words(
    message: str, param: str, code: str, expected: str
) -> None:
    vllms = "input_tokens" if param == "prompt" else f"body.{param}"
    error = {"message": message, "type": "Bad Request", "param": vllms, "code": 400}
    data = json.dumps({"error": error}).encode()
    assert json.loads(replica_error(data, 400, path="/v1/completions"))["error"] == {
        "message": expected,
        "type": "invalid_request_error",
        "param": param,
        "code": code,
    }


def listed(*problems: tuple[str, str, str, str], cut: bool = False) -> str:
    """Return a list of problems in vLLM's form, from the kind, place, reason and value of each."""
    lines = [
        f"  {{'type': '{kind}', 'loc': 'body.{place}', 'msg': \"{reason}\", 'input': '{value}'}}"
        for kind, place, reason, value in problems
    ]
    more = ["  ...and 90 more errors"] if cut else []
    return "\n".join([f"{len(lines)} validation errors:", *lines, *more])


BLOCK = ("literal_error", "messages.0.content.0.type", "Input should be 'a'", "b")
LIST = ("string_type", "messages.0.content", "Input should be a valid string", "<list of 1 items>")
OTHER = ("literal_error", "input.0.Other.type", "Input should be 'other'", "mine")
LESS = ("missing", "input.0.Other.id", "Field required", "<dict of 1 items>")
THIRD = ("literal_error", "input.0.Third.type", "Input should be 'third' or 'fourth'", "mine")
FIELD = ("string_type", "input.0.Mine.text", "Input should be a valid string", "5")
PART = ("literal_error", "input.0.Mine.parts.1.A.type", "Input should be 'a'", "c")
PART_2 = ("literal_error", "input.0.Mine.parts.1.B.type", "Input should be 'b'", "c")
NO_OBJECT = ("model_type", "input.0.Mine", "Input should be a valid dictionary", "x")


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            listed(
                LIST, ("literal_error", "messages.0.content.0.type", "Input should be 'a'", "b")
            ),
            "messages.0.content.0.type is b; expected 'a'",
        ),
        (listed(LESS, OTHER, FIELD, THIRD), "input.0.text is 5; expected a valid string"),
        (listed(LESS, OTHER, THIRD), "input.0.type is mine; expected 'other', 'third', 'fourth'"),
        (listed(LESS, OTHER, PART, PART_2), "input.0.parts.1.type is c; expected 'a', 'b'"),
        (listed(LESS, OTHER, THIRD, cut=True), "input.0 is not a valid object of the type mine"),
        (listed(NO_OBJECT), "input.0 is x; expected an object"),
        (
            listed(("missing", "input.0.Mine", "Field required", "<dict of 2 items>")),
            "input.0.arguments is missing",
        ),
        (
            listed(
                (
                    "union_tag_invalid",
                    "thinking",
                    "Input tag 'c' found using 'type' does not match any of the expected tags: "
                    "'a', 'b'",
                    "<dict of 1 items>",
                )
            ),
            "thinking.type is c; expected 'a', 'b'",
        ),
    ],
)
def test_of_an_error_of_a_union_the_innermost_cause_is_told(message: str, expected: str) -> None:
    error = {"message": message, "type": "Bad Request", "param": "body.x", "code": 400}
    data = json.dumps({"error": error}).encode()
    told = json.loads(replica_error(data, 400, path="/v1/responses"))["error"]
    assert told["message"] == expected
    assert told["param"] == expected.split(" ")[0]


def test_an_error_in_a_stream_of_vllm_has_our_code() -> None:
    error = {"message": "gone", "type": "InternalServerError", "param": None, "code": 500}
    data = failure_event(f"data: {json.dumps({'error': error})}\n\ndata: [DONE]\n\n".encode())
    first, _, end = data.partition(b"\n\n")
    assert end == b"data: [DONE]\n\n"
    ours = json.loads(first.removeprefix(b"data: "))["error"]
    assert (ours["type"], ours["code"]) == ("server_error", "server_error")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/embeddings"])
def test_a_route_that_the_model_lacks_is_an_error_in_the_format_of_its_api(path: str) -> None:
    body = json.loads(replica_error(b'{"detail":"Not Found"}', 404, path=path))
    assert path in body["error"]["message"]


def test_a_long_message_of_a_replica_is_cut_in_its_middle() -> None:
    message = f"top_logprobs: {'x' * 100_000}: expected an integer"
    error = {"message": message, "type": "BadRequestError", "param": None, "code": 400}
    data = json.dumps({"error": error}).encode()
    cut = json.loads(replica_error(data, 400, path="/v1/completions"))["error"]
    assert cut["message"].startswith("top_logprobs: xxx")
    assert cut["message"].endswith("xxx: expected an integer")
    assert len(cut["message"]) < 2000
