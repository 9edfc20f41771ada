"""vLLM's HTTP application inside a replica answers as vLLM's own server does, and goes on with what
another replica has begun."""

import re
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.support import bodies
from tests.support.answers import data_of, status_of
from tests.support.applications import can_continue, chunks_of, goes_on, prompt_of, request_of
from tests.support.bodies import (
    ASK,
    CHATS,
    CONTINUED,
    MESSAGES,
    OTHERS,
    RESPONSES,
    Body,
    comparable,
)
from tests.support.engines import TOOL_PARSER, Running
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.timeout(240),
    pytest.mark.parametrize("running", ["vllm"], indirect=True),
    pytest.mark.usefixtures("unmerged"),
]

Stock = Callable[[str, Body | bytes], Awaitable[tuple[int, bytes]]]

CUTS = (1, 2, 5, 10)  # chunks that have come


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
        full = {"model": "m", "temperature": 0, **body}
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
    from kvroute.replica.vllm_engine import http_app, repeatable

    for name, attributes in repeatable.REPLACED.items():
        module = __import__(name, fromlist=["_"])
        for attribute in attributes:
            assert hasattr(module, attribute), (name, attribute)
    renderer = engine_of(running)._llm.renderer
    replaced = [name for name in vars(http_app._Renderer) if name.startswith("render_")]
    assert len(replaced) == 2
    assert all(hasattr(renderer, name) for name in replaced)


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
