"""vLLM's HTTP application inside a replica answers as vLLM's own server does, and goes on with what
another replica has begun."""

import inspect
import json
import re
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.generation import NO_TOKENS, Chunk
from kvroute.contract.http_call import HttpCall
from tests.support import bodies
from tests.support.answers import data_of, ids_of, status_of
from tests.support.applications import (
    CREATED,
    can_continue,
    chunks_of,
    goes_on,
    prompt_of,
    request_of,
)
from tests.support.bodies import (
    ASK,
    CHATS,
    COMPLETIONS,
    CONTINUED,
    FUNCTION,
    MANY_OUTPUTS,
    MESSAGES,
    NAMED,
    OTHERS,
    PARAMETERS,
    RESPONSES,
    TOOL,
    Body,
    comparable,
)
from tests.support.chunks import collected
from tests.support.engines import TOOL_PARSER, Running, rest_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.parametrize("running", ["vllm"], indirect=True),
    pytest.mark.usefixtures("unmerged"),
]

Stock = Callable[[str, Body | bytes], Awaitable[tuple[int, bytes]]]

CUTS = (1, 2, 5, 10)  # chunks that have come
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"  # vLLM 0.31 omits an incomplete character at the end
LATE = 20


@pytest_asyncio.fixture(loop_scope="session")
async def stock(running: Running) -> Stock:
    """Status and body of what vLLM's own server answers."""
    from tests.support.stock import stock_answer, stock_app

    app = await stock_app(engine_of(running)._llm, tool_call_parser=TOOL_PARSER)
    return partial(stock_answer, app)


def engine_of(running: Running) -> Any:
    return running.engine


async def test_it_answers_as_vllms_own_server(running: Running, stock: Stock) -> None:
    """200 bodies of every route and kind, valid and not."""
    differing, asked = [], 0
    for path, body in bodies.calls("m"):
        asked += 1
        ids = await prompt_of(running, path, body)
        ours = await chunks_of(running, request_of(path, body, ids))
        status, data = await stock(path, body)
        if (status_of(ours), comparable(data_of(ours))) != (status, comparable(data)):
            differing.append((path, body, data_of(ours)[-300:], data[-300:]))
    assert asked >= 200
    assert differing == []


@pytest.mark.parametrize(("path", "plain", "said"), bodies.CONVERSATIONS)
async def test_what_is_said_of_a_conversation_changes_no_answer(
    running: Running, path: str, plain: Body, said: Body
) -> None:
    answers = []
    for body in (plain, plain | said):
        full = {"model": "m", "temperature": 0, "max_output_tokens": 12, "max_tokens": 12, **body}
        ids = await prompt_of(running, path, full)
        chunks = await chunks_of(running, request_of(path, full, ids))
        answers.append((status_of(chunks), bodies.texts(data_of(chunks))))
    assert answers[0] == answers[1]
    assert answers[0][0] == 200
    assert answers[0][1]


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b'"a"', b"\xff", b'{"messages": 1}'])
async def test_so_it_does_for_what_is_no_body(running: Running, stock: Stock, raw: bytes) -> None:
    ours = await chunks_of(running, request_of(CHATS, raw))
    status, data = await stock(CHATS, raw)
    assert (status_of(ours), data_of(ours)) == (status, data)


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", [*CONTINUED, *OTHERS])
async def test_what_was_cut_anywhere_goes_on_byte_for_byte(
    running: Running, kind: str, is_streamed: bool
) -> None:
    path = kind if kind in OTHERS else CHATS
    own = OTHERS.get(kind) or {"messages": ASK, "max_tokens": 14, **CONTINUED[kind]}
    body = {"model": "m", "temperature": 0, "stream": is_streamed, **own}
    request = request_of(path, body, await prompt_of(running, path, body))
    await chunks_of(running, request)
    undisturbed = await chunks_of(running, request)
    assert status_of(undisturbed) == 200
    for cut in [each for each in CUTS if each < len(undisturbed)]:
        if not await goes_on(running, request, undisturbed, cut=cut):
            assert "logprobs" in body
            assert not is_streamed


@pytest.mark.parametrize("kind", MANY_OUTPUTS)
async def test_so_does_what_was_cut_late(running: Running, kind: str) -> None:
    path, own = MANY_OUTPUTS[kind]
    body = {"model": "m", "temperature": 0, "stream": True, **own}
    request = request_of(path, body, await prompt_of(running, path, body))
    await chunks_of(running, request, most=1)
    undisturbed = await chunks_of(running, request)
    assert len(undisturbed) > LATE
    assert await goes_on(running, request, undisturbed, cut=LATE)
    calls = set(re.findall(rb'"index":(\d),"function":{"name":"f"', data_of(undisturbed)))
    assert len(calls) == (2 if kind == "two tools" else 0)


# Members of a response object that the Open Responses specification requires, null or not.
NEVER_NULL = (
    *("id", "object", "created_at", "status", "model", "output", "tools", "tool_choice"),
    *("truncation", "parallel_tool_calls", "text", "top_p", "presence_penalty", "metadata"),
    *("frequency_penalty", "top_logprobs", "temperature", "store", "background", "service_tier"),
)
NULLABLE = (
    *("completed_at", "incomplete_details", "previous_response_id", "instructions", "error"),
    *("reasoning", "user", "usage", "max_output_tokens", "max_tool_calls"),
    *("safety_identifier", "prompt_cache_key"),
)


@pytest.mark.parametrize("own", [{}, {"max_output_tokens": 2}, {"prompt_cache_key": "k"}])
async def test_a_response_object_has_every_member_whole_and_in_events(
    running: Running, own: Body
) -> None:
    body = {"model": "m", "input": "Say hi", **own}
    whole = json.loads(data_of(await chunks_of(running, request_of(RESPONSES, body))))
    stream = await chunks_of(running, request_of(RESPONSES, {**body, "stream": True}))
    lines = [line[6:] for line in data_of(stream).decode().splitlines() if line[:7] == "data: {"]
    objects = [event["response"] for event in map(json.loads, lines) if "response" in event]
    assert len(objects) == 3
    for found in (whole, *objects):
        assert {*NEVER_NULL, *NULLABLE} - found.keys() == set()
        assert [name for name in NEVER_NULL if found[name] is None] == []
        assert found["prompt_cache_key"] == own.get("prompt_cache_key")
        assert (found["completed_at"] is None) is (found["status"] != "completed")
    assert whole["text"]["format"] == {"type": "text"}


FOR_GUIDANCE = {"type": "string", "pattern": "^[a-z]*$", "minLength": 3, "maxLength": 6}


async def test_a_schema_for_another_backend_of_grammars_disturbs_nobody(running: Running) -> None:
    """vLLM would compile all later grammars by the backend of the first one."""
    schema = {"name": "s", "schema": {"type": "object", "properties": {"a": FOR_GUIDANCE}}}
    form = {"type": "json_schema", "json_schema": {**schema, "strict": True}}
    tool: Body = {"tools": [bodies.STRICT], "tool_choice": "required"}
    for own in (
        tool,
        {"response_format": form},
        tool,
        {"structured_outputs": {"regex": "[ab]{3}"}},
    ):
        body = {"model": "m", "messages": ASK, "max_tokens": 60, **own}
        chunks = await chunks_of(running, request_of(CHATS, body))
        assert status_of(chunks) == 200, (own, data_of(chunks))
        (choice,) = json.loads(data_of(chunks))["choices"]
        assert choice["message"].get("tool_calls") or choice["message"]["content"]


EMOJIS = "ok \N{GRINNING FACE}\N{PARROT}\N{TEST TUBE}\N{ROBOT FACE} and so on"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
async def test_what_was_cut_within_a_character_goes_on_byte_for_byte(
    running: Running, path: str
) -> None:
    """Tokens that are parts of a character have no text of their own, so later ones shift."""
    own: Body = {"prompt": "Hi", "logprobs": 2} if path == COMPLETIONS else {"messages": ASK}
    own |= {} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 2}
    body = {"model": "m", "temperature": 0, "stream": True, "max_tokens": 60, **own}
    body |= {"structured_outputs": {"choice": [EMOJIS]}}
    request = request_of(path, body, await prompt_of(running, path, body))
    await chunks_of(running, request, most=1)
    undisturbed = await chunks_of(running, request)
    assert len(undisturbed) > 5
    for cut in range(1, len(undisturbed) - 1):
        assert await goes_on(running, request, undisturbed, cut=cut), cut


async def test_a_streamed_response_with_a_bad_schema_is_refused_as_a_whole_one_is(
    running: Running,
) -> None:
    """vLLM's own server breaks the connection."""
    schema: Any = bodies.NONSENSE["json_schema"]
    form = {"type": "json_schema", **schema}
    body = {"model": "m", "input": "Hi", "text": {"format": form}}
    whole, streamed = [
        await chunks_of(running, request_of(RESPONSES, {**body, "stream": stream}))
        for stream in (False, True)
    ]
    assert status_of(whole) == status_of(streamed) == 400
    assert data_of(whole) == data_of(streamed)


REFUSED = {"type": "refusal", "refusal": "I would rather not."}
HISTORY_WITH_REFUSAL: Body = {
    "model": "m",
    "input": [
        {"role": "user", "content": "Hi"},
        {"type": "message", "role": "assistant", "content": [REFUSED]},
        {"role": "user", "content": "Why?"},
    ],
}


async def test_what_vllm_cannot_render_is_an_error_of_the_request_with_its_cause(
    running: Running,
) -> None:
    """And not a lost replica: another one would fail as well."""
    request = request_of(RESPONSES, HISTORY_WITH_REFUSAL)
    chunks = await chunks_of(running, request)
    assert status_of(chunks) == 500
    assert "'ResponseOutputRefusal' object has no attribute" in data_of(chunks).decode()
    assert request.call is not None
    rendered = await engine_of(running).render(request.call)
    assert rendered.refusal is not None
    assert (rendered.refusal.status, rendered.refusal.data) == (500, data_of(chunks))


@pytest.mark.parametrize("asked", [{"prompt_logprobs": 5}, {"echo": True, "logprobs": 5}])
async def test_log_probabilities_of_prompts_have_a_limit(
    running: Running, monkeypatch: pytest.MonkeyPatch, asked: Body
) -> None:
    """The loop makes all of them at once."""
    monkeypatch.setattr("kvroute.replica.vllm_engine.http.sampling_checks.MAX_PROMPT_LOGPROBS", 12)
    statuses = [
        status_of(await chunks_of(running, request_of(COMPLETIONS, body | asked)))
        for prompt in ([1, 2], [1, 2, 3])
        for body in ({"model": "m", "prompt": prompt, "max_tokens": 1},)
    ]
    assert statuses == [200, 400]


PERSON = r'\{"name": "[a-z]{4,9}", "age": [1-9][0-9]?\}'
RANDOM = {"model": "m", "temperature": 1.0, "seed": 7}
SEEDED: dict[str, Body] = {
    CHATS: {"messages": ASK, "max_tokens": 40, "structured_outputs": {"regex": PERSON}},
    COMPLETIONS: {"prompt": "One, two,", "max_tokens": 16},
    RESPONSES: {"input": "Say hi", "max_output_tokens": 16},
}


@pytest.mark.parametrize("path", SEEDED)
async def test_what_goes_on_with_a_seed_is_whole_and_the_same_each_time(
    running: Running, path: str
) -> None:
    """Of other random numbers than the undisturbed one."""
    body = {**RANDOM, **SEEDED[path]}
    request = request_of(path, body, await prompt_of(running, path, body))
    tokenizer = engine_of(running)._llm.get_tokenizer()
    for cut in (1, 2, 3):
        begun = await chunks_of(running, request, most=cut)
        ends = [await chunks_of(running, rest_of(request, begun)) for _ in range(2)]
        assert ids_of(ends[0]) == ids_of(ends[1]) != []
        assert data_of(ends[0]) == data_of(ends[1])
        answer = json.loads(data_of(ends[0]))
        sent = ids_of(begun)
        begun_text = tokenizer.decode(sent, skip_special_tokens=True)
        assert said(answer).startswith(begun_text.rstrip(INCOMPLETE))
        assert list(answer["usage"].values()).count(len(sent + ids_of(ends[0]))) == 1
        if path == CHATS:
            assert answer["choices"][0]["finish_reason"] == "stop"
            assert re.fullmatch(PERSON, said(answer))


@pytest.mark.parametrize("path", SEEDED)
async def test_a_seeded_stream_repeats_and_leaves_out_nothing_behind_a_cut(
    running: Running, path: str
) -> None:
    body = {**RANDOM, **SEEDED[path], "stream": True}
    request = request_of(path, body, await prompt_of(running, path, body))
    for cut in (1, 3):
        begun = await chunks_of(running, request, most=cut)
        chunks = begun + await chunks_of(running, rest_of(request, begun))
        tokenizer = engine_of(running)._llm.get_tokenizer()
        text = "".join(deltas_of(chunks))
        whole = tokenizer.decode(ids_of(chunks), skip_special_tokens=True)
        assert text.rstrip(INCOMPLETE) == whole.rstrip(INCOMPLETE)
        assert chunks[-1].is_last


def deltas_of(chunks: list[Chunk]) -> Iterator[str]:
    """The text of a stream in pieces."""
    for line in data_of(chunks).decode().splitlines():
        event = json.loads(line[6:]) if line.startswith("data: {") else {}
        if event.get("type") == "response.output_text.delta":
            yield event["delta"]
        for choice in event.get("choices", ()):
            yield choice["text"] if "text" in choice else choice["delta"].get("content") or ""


def said(answer: Any) -> str:
    """The text of a whole answer."""
    if "output" in answer:
        return str(answer["output"][0]["content"][0]["text"])
    (choice,) = answer["choices"]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


@pytest.mark.parametrize(("path", "field"), [(CHATS, "messages"), (RESPONSES, "input")])
async def test_many_bad_items_are_refused_for_the_first(
    running: Running, path: str, field: str
) -> None:
    """The errors of all would hold up other requests for seconds."""
    first, all_ = [
        await chunks_of(running, request_of(path, {"model": "m", field: [{"role": 1}] * many}))
        for many in (1, 2000)
    ]
    assert status_of(first) == status_of(all_) == 400
    counts = {re.findall(rb"(\d+) validation errors", data_of(each))[0] for each in (first, all_)}
    assert len(counts) == 1


@pytest.mark.parametrize(
    "change", [{"n": 2, "temperature": 1.0}, {"presence_penalty": 1.0}, {"use_beam_search": True}]
)
async def test_it_says_what_cannot_go_on(running: Running, change: Body) -> None:
    body = {"model": "m", "messages": ASK, "max_tokens": 6, **change}
    request = request_of(CHATS, body, await prompt_of(running, CHATS, body))
    assert not can_continue(await chunks_of(running, request))


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_nothing_runs_for_a_client_that_has_left(running: Running, is_streamed: bool) -> None:
    body = {"model": "m", "messages": ASK, "max_tokens": 900, "ignore_eos": True}
    request = request_of(CHATS, body | {"stream": is_streamed})
    await chunks_of(running, request, most=1)
    states = engine_of(running)._llm.output_processor.request_states
    await until(lambda: not states)


async def test_routes_without_an_answer_of_the_engine_are_vllms(
    running: Running, stock: Stock
) -> None:
    own: dict[str, Body] = {
        "/tokenize": {"model": "m", "messages": ASK},
        "/detokenize": {"model": "m", "tokens": [1, 2, 3]},
        "/v1/messages/count_tokens": {"model": "m", "messages": ASK},
        "/v1/embeddings": {"model": "m", "input": "hi"},
    }
    for path, body in own.items():
        ours = await chunks_of(running, request_of(path, body))
        assert (status_of(ours), data_of(ours)) == await stock(path, body)


async def test_a_clients_own_extra_arguments_cannot_be_ours(running: Running) -> None:
    """Such as a pin that would hold blocks for ever."""
    body = {"model": "m", "messages": ASK, "max_tokens": 2, "vllm_xargs": {"kvroute_pin": "x"}}
    assert status_of(await chunks_of(running, request_of(CHATS, body))) == 200
    llm = engine_of(running)._llm
    assert not await llm.engine_core.call_utility_async("kvroute_pinned", "x")


async def test_vllm_still_has_what_is_replaced(running: Running) -> None:
    """The hooks into the pinned version; see docs/upgrading.md."""
    renderer = type(engine_of(running)._llm.renderer)
    for name in ("render_chat_async", "render_cmpl_async", "tokenize_prompt_async"):
        assert inspect.iscoroutinefunction(getattr(renderer, name)), name


async def test_vllms_handlers_get_objects_of_the_classes_that_they_ask_for(
    running: Running,
) -> None:
    """`isinstance(renderer, HfRenderer)`, for example, decides where system messages go."""
    from vllm.renderers.hf import HfRenderer
    from vllm.v1.engine.async_llm import AsyncLLM

    state = engine_of(running)._http._app.state
    assert isinstance(state.engine_client, AsyncLLM)
    for name, handler in vars(state)["_state"].items():
        if hasattr(handler, "renderer"):
            assert isinstance(handler.renderer, HfRenderer), name


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
async def test_the_routers_salt_holds_also_for_what_the_replica_renders(
    running: Running, path: str
) -> None:
    """Whatever the body says: its client could take another tenant's."""
    text = f"{path}: what this tenant has said is nobody else's to find. " * 20
    messages = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
    body: Body = messages if path != RESPONSES else {"input": text, "max_output_tokens": 1}
    cached = []
    for tenant, own in (("a", ""), ("b", "a"), ("c", "a"), ("b", "b"), ("a", "c")):
        asked = {"model": "m", **body} | ({"cache_salt": own} if own else {})
        if path == MESSAGES:
            asked.pop("cache_salt", None)
        request = replace(request_of(path, asked), namespace=tenant)
        chunks = await chunks_of(running, request)
        assert status_of(chunks) == 200
        cached.append(chunks[0].cached_tokens > 100)
    assert cached == [False, False, False, True, True]


@pytest_asyncio.fixture(loop_scope="session")
async def bare(running: Running) -> Any:
    """The application of a replica without options, on the same engine."""
    from kvroute.replica.vllm_engine.http.app import HttpApp

    engine = engine_of(running)
    return await HttpApp.start(engine._llm, {}, [engine._adapters], max_compile_s=5)


FLAT = {"type": "function", **FUNCTION}
THEIRS = {"name": "get_weather", "input_schema": PARAMETERS}
CHOICES: dict[str, tuple[Body, list[Any]]] = {
    CHATS: ({"messages": ASK, "tools": [TOOL]}, [None, "auto", "required", NAMED]),
    RESPONSES: (
        {"input": ASK, "tools": [FLAT]},
        [None, "auto", "required", {"type": "function", "name": "get_weather"}],
    ),
    MESSAGES: (
        {"messages": ASK, "tools": [THEIRS]},
        [
            None,
            *({"type": each} for each in ("auto", "any")),
            {"type": "tool", "name": "get_weather"},
        ],
    ),
}


@pytest.mark.parametrize("is_rendered", [True, False])
@pytest.mark.parametrize("path", CHOICES)
async def test_tools_without_a_parser_are_refused_by_the_options_name(
    bare: Any, path: str, is_rendered: bool
) -> None:
    own, choices = CHOICES[path]
    ids = np.arange(100, 120, dtype=np.uint32) if is_rendered else NO_TOKENS
    for choice in choices:
        chosen = {"tool_choice": choice} if choice else {}
        request = request_of(path, {"model": "m", "max_tokens": 4, **own, **chosen}, ids)
        chunks = await collected(bare.respond, request)
        assert status_of(chunks) == 400
        error = json.loads(data_of(chunks))["error"]
        assert re.search("tool.call.parser", error["message"])
        assert ("param" in error) == (path != MESSAGES)


@pytest.mark.parametrize("path", CHOICES)
async def test_a_router_that_asks_for_the_prompt_hears_the_same(bare: Any, path: str) -> None:
    raw = json.dumps({"model": "m", "max_tokens": 4, **CHOICES[path][0]}).encode()
    refusal = (await bare.render(HttpCall(path, raw, CREATED, is_rendered=False))).refusal
    assert refusal.status == 400
    assert re.search(b"tool.call.parser", refusal.data)


@pytest.mark.parametrize("path", CHOICES)
async def test_tools_that_are_not_to_be_called_need_no_parser(bare: Any, path: str) -> None:
    none: Any = {"type": "none"} if path == MESSAGES else "none"
    most = {"max_tokens": 4, "max_output_tokens": 4}
    body = {"model": "m", **most, **CHOICES[path][0], "tool_choice": none}
    without = {name: value for name, value in body.items() if "tool" not in name}
    for each in (body, without):
        chunks = await collected(bare.respond, request_of(path, each))
        assert status_of(chunks) == 200, data_of(chunks)


@pytest.mark.parametrize("path", [CHATS, RESPONSES, MESSAGES])
async def test_a_model_without_a_chat_template_says_so(
    running: Running, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.renderers import hf

    monkeypatch.setattr(hf, "resolve_chat_template", lambda *_, **__: None)
    own = {"input": ASK} if path == RESPONSES else {"messages": ASK}
    chunks = await chunks_of(running, request_of(path, {"model": "m", "max_tokens": 4, **own}))
    assert status_of(chunks) == 400
    assert b"provide a chat template" in data_of(chunks)


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
async def test_an_adapter_answers_responses_and_messages_also_behind_a_cut(
    running: Running, path: str
) -> None:
    texts, text = [], f"{path}: what is the weather in Paris? " * 9
    own_text = {"input": text, "messages": [{"role": "user", "content": text}]}
    for name in ("m", "sql", "law"):
        body = {**OTHERS[path], **own_text, "model": name, "temperature": 0}
        own = replace(request_of(path, body), variant="" if name == "m" else name)
        first = await chunks_of(running, own)
        again = await chunks_of(running, own)
        assert status_of(first) == status_of(again) == 200
        assert first[0].cached_tokens < again[0].cached_tokens
        answer = json.loads(data_of(again))
        assert answer["model"] == name
        texts.append(json.dumps(answer.get("output", answer.get("content"))))
        rendered = replace(own, token_ids=await prompt_of(running, path, body))
        assert await goes_on(running, rendered, again, cut=2)
    assert len(set(texts)) == 3
