"""Thoughts are told apart from answers as in vLLM's own server, also where another replica has
begun, amid the thoughts or behind them.

The shallow model never ends its thoughts by itself: a bias for the end mark makes it end them after
some tokens. A grammar, which begins behind them, forbids the mark again.
"""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from tests.support.answers import data_of, ids_of, status_of
from tests.support.applications import chunks_of, goes_on, prompt_of, request_of
from tests.support.bodies import ASK, CHATS, MESSAGES, RESPONSES, SCHEMA, TOOL, Body, comparable
from tests.support.engines import SHALLOW_CACHE_MB, TOOL_PARSER, Running, started, thinking_model
from tests.support.repository import ROOT

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.usefixtures("unmerged"),
]

Stock = Callable[[str, Body], Awaitable[tuple[int, bytes]]]

TEMPLATES = ROOT / "tests" / "templates"
PARSER = "deepseek_r1"
END = 6  # the token </think>
BIAS = {"logit_bias": {str(END): 40}}
CUTS = (1, 5, 10, 11, 12, 20)  # tokens that have come; the thoughts have ten
CHAT = {"model": "m", "messages": ASK, "temperature": 0, "max_tokens": 30}
KINDS: dict[str, tuple[str, Body]] = {
    "thoughts only": (CHATS, CHAT),
    "thoughts and an answer": (CHATS, CHAT | BIAS),
    "thoughts and a schema": (CHATS, CHAT | BIAS | {"response_format": SCHEMA}),
    "thoughts and a tool": (CHATS, CHAT | BIAS | {"tools": [TOOL], "tool_choice": "required"}),
    "a response's thoughts": (
        RESPONSES,
        {"model": "m", "input": ASK, "temperature": 0, "max_output_tokens": 30},
    ),
    "a message's thoughts": (MESSAGES, CHAT),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def thinking(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tmp_path_factory.mktemp("thinking") / "model"
    async with started(
        "vllm",
        model=str(thinking_model(folder)),
        kv_cache_memory_mb=SHALLOW_CACHE_MB,
        engine_args={"reasoning_parser": PARSER, "tool_call_parser": TOOL_PARSER},
    ) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stock(thinking: Running) -> Stock:
    from tests.support.stock import stock_answer, stock_app

    engine: Any = thinking.engine
    return partial(stock_answer, await stock_app(engine._llm, tool_call_parser=TOOL_PARSER))


@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
@pytest.mark.parametrize("kind", KINDS)
async def test_it_is_as_in_vllms_own_server_wherever_it_is_cut(
    thinking: Running, stock: Stock, kind: str, is_streamed: bool
) -> None:
    path, body = KINDS[kind][0], KINDS[kind][1] | {"stream": is_streamed}
    request = request_of(path, body, await prompt_of(thinking, path, body))
    undisturbed = await chunks_of(thinking, request)
    status, data = await stock(path, body)
    assert (status_of(undisturbed), comparable(data_of(undisturbed))) == (status, comparable(data))
    assert status == 200
    for cut in [each for each in CUTS if each < len(undisturbed)]:
        assert await goes_on(thinking, request, undisturbed, cut=cut)


async def test_thoughts_end_where_the_mark_is_and_a_grammar_begins_behind_it(
    thinking: Running,
) -> None:
    path, body = KINDS["thoughts and a schema"]
    chunks = await chunks_of(
        thinking, request_of(path, body, await prompt_of(thinking, path, body))
    )
    assert ids_of(chunks).index(END) == 10
    message = json.loads(data_of(chunks))["choices"][0]["message"]
    assert message["reasoning"].strip()
    assert message["content"].startswith("{")


@pytest.mark.parametrize(("given", "chosen"), [("", "qwen3"), ("none", ""), (PARSER, PARSER)])
def test_the_parser_is_the_users_or_follows_from_the_chat_template(given: str, chosen: str) -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    from kvroute.replica.vllm_engine.http.chosen_parsers import choose_reasoning_parser

    args = AsyncEngineArgs(model=resolve(BUILTIN_MODEL), reasoning_parser=given)
    choose_reasoning_parser(args, str(TEMPLATES / "qwen3.jinja"))
    assert args.reasoning_parser == chosen
