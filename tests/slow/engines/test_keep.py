"""Engines keep the blocks of requests for as long as these say."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.generation import NO_TOKENS, Chunk, GenerateRequest
from kvroute.contract.http_call import HttpCall
from kvroute.contract.keep import Keep
from kvroute.replica.engine.kv_events import Evictions
from tests.support.applications import chunks_of, request_of
from tests.support.applications import prompt_of as rendered
from tests.support.bodies import ASK, CALLED, CHATS, MESSAGES, RESPONSES, TOOL, Body
from tests.support.engines import BLOCK, Running, prompt_of
from tests.support.engines import request_of as completion_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

ONE_SHOT = Keep(chance=0.1)
TOOLS = Keep(chance=0.0, session=1, tool_chance=1.0, tool_s=60.0)
LATER = 20 * BLOCK  # tokens of a prompt that comes back


@pytest_asyncio.fixture(loop_scope="session")
async def cache(running: Running) -> AsyncIterator[Running]:
    """An empty cache."""
    assert await running.engine.reset_prefix_cache()
    await running.compare()
    running.evictions.clear()
    yield running
    assert (await running.compare()).drift == 0
    assert await running.engine.reset_prefix_cache()


async def ask(running: Running, prompt: list[int], keep: Keep | None) -> int:
    """Returns the tokens that were cached."""
    request = replace(completion_of(prompt, max_tokens=1), keep=keep)
    return (await running.run(request))[0].cached_tokens


async def evict(
    running: Running, blocks: int, keep: Keep | None = ONE_SHOT, *, seed: int = 1000
) -> None:
    """Other prompts fill the cache, and evict about as many blocks."""
    missing = running.engine.facts.capacity_blocks - len(running.table) + blocks
    for number in range(missing // 20):
        await ask(running, prompt_of(20 * BLOCK, seed + number), keep)


def evicted(running: Running) -> Evictions:
    """In all."""
    names = "ended", "unlikely", "usual", "promised"
    return Evictions(*(sum(getattr(each, name) for each in running.evictions) for name in names))


async def test_what_comes_back_outlives_prompts_that_do_not(cache: Running) -> None:
    first, second = prompt_of(LATER, seed=301), prompt_of(LATER, seed=302)
    await ask(cache, first, Keep(session=1))
    await ask(cache, second, ONE_SHOT)
    await evict(cache, 3 * cache.engine.facts.capacity_blocks)
    await cache.compare()
    assert evicted(cache).unlikely >= 2 * cache.engine.facts.capacity_blocks
    assert evicted(cache).usual == 0
    assert await ask(cache, [*first, 0], None) == LATER
    assert await ask(cache, [*second, 0], None) == 0


async def test_with_nothing_said_the_oldest_goes_first(cache: Running) -> None:
    first = prompt_of(LATER, seed=303)
    await ask(cache, first, None)
    await evict(cache, 40, keep=None)
    await cache.compare()
    assert evicted(cache).usual >= 20
    assert await ask(cache, [*first, 0], None) == 0


async def test_the_blocks_of_a_session_that_has_ended_go_first(cache: Running) -> None:
    stays, ends = prompt_of(LATER, seed=304), prompt_of(LATER, seed=305)
    await ask(cache, stays, Keep(session=1))
    await ask(cache, ends, Keep(session=2))
    await cache.engine.end_session(2)
    await cache.engine.end_session(3)  # nobody's
    await until(lambda: len(cache.table) >= 40)
    await evict(cache, 20, keep=None)
    await cache.compare()
    assert evicted(cache).ended > 0
    assert evicted(cache).usual == 0
    assert await ask(cache, [*stays, 0], None) == LATER
    assert await ask(cache, [*ends, 0], None) < LATER


async def test_a_request_can_be_the_last_of_its_session(cache: Running) -> None:
    await ask(cache, prompt_of(LATER, seed=306), Keep(session=1))
    await ask(cache, prompt_of(LATER, seed=307), Keep(chance=0.0, session=2))
    await until(lambda: len(cache.table) >= 40)
    await evict(cache, 20, keep=None)
    await cache.compare()
    assert evicted(cache).ended > 0
    assert evicted(cache).usual == 0


async def test_a_promise_is_kept_and_one_that_cannot_be_is_counted(cache: Running) -> None:
    prompt = prompt_of(LATER, seed=308)
    await ask(cache, prompt, Keep(0.0001, still_s=3600.0, session=1))
    await evict(cache, 3 * cache.engine.facts.capacity_blocks, keep=None)
    assert await ask(cache, [*prompt, 0], None) == LATER
    await evict(cache, 120, keep=Keep(still_s=3600.0, session=2), seed=2000)
    await cache.compare()
    assert evicted(cache).promised > 0


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
@pytest.mark.parametrize("is_streamed", [True, False], ids=["streamed", "whole"])
async def test_an_answer_that_ends_with_a_tool_call_keeps_its_prompt(
    cache: Running, is_streamed: bool
) -> None:
    call = {"tools": [TOOL], "structured_outputs": {"choice": [CALLED]}}
    body: Body = {"model": "m", "messages": ASK, "stream": is_streamed, **call}
    ids = await rendered(cache, CHATS, body)
    chunks = await chunks_of(cache, replace(request_of(CHATS, body, ids), keep=TOOLS))
    assert [chunk.http.is_tool_call for chunk in chunks if chunk.http and chunk.is_last] == [True]
    engine: Any = cache.engine
    await until(lambda: not engine._labelling)
    await evict(cache, 3 * cache.engine.facts.capacity_blocks, keep=None)
    assert await ask(cache, [*ids.tolist(), 0], None) == len(ids) // BLOCK * BLOCK > 0


# The ends of answers, as vLLM's application sends them.
ENDS = {
    CHATS: [b'{"index":0,"finish_reason":"tool_calls"}'],
    MESSAGES: [b'{"delta":{"stop_reason":"tool_use",', b'"stop_sequence":null}}'],
    RESPONSES: [b'{"output":[{"arguments":"{}","name":"f","type":"function_call"}]}'],
}


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
@pytest.mark.parametrize("path", ENDS)
async def test_each_route_says_in_its_own_way_that_a_tool_is_called(
    running: Running, path: str
) -> None:
    from kvroute.replica.vllm_engine.http.run import Run

    async def is_tool_call(data: list[bytes]) -> bool:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            for each in data:
                await send({"type": "http.response.body", "body": each, "more_body": True})

        call = HttpCall(path, b"{}", 1.0)
        chunks: list[Chunk] = []
        run = Run(GenerateRequest("r", NO_TOKENS, call=call), call, chunks.append)
        await run.respond(app)
        (chunk,) = chunks
        assert chunk.http
        assert chunk.http.is_tool_call == run.is_tool_call
        return run.is_tool_call

    assert [other for other in ENDS if await is_tool_call(ENDS[other])] == [path]
    texts = [json.dumps({"text": data.decode()}).encode() for data in ENDS[path]]
    assert not await is_tool_call(texts)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
@pytest.mark.parametrize(
    ("delta", "reason", "is_tool_call"),
    [("tool_calls", "stop", True), ("tool_calls", "length", False), ("content", "stop", False)],
)
async def test_a_chat_whose_tool_was_named_ends_with_stop(
    running: Running, delta: str, reason: str, is_tool_call: bool
) -> None:
    from kvroute.replica.vllm_engine.http.run import Run

    call, chunks = HttpCall(CHATS, b"{}", 1.0), list[Chunk]()
    run = Run(GenerateRequest("r", NO_TOKENS, call=call), call, chunks.append)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        start = b'{"delta":{"%s":[{"index":0}]},"finish_reason":null}' % delta.encode()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": start, "more_body": True})
        run._put()  # the engine has an output
        end = b'{"finish_reason":"%s"}' % reason.encode()
        await send({"type": "http.response.body", "body": end, "more_body": False})

    await run.respond(app)
    said = [chunk.http and chunk.http.is_tool_call for chunk in chunks]
    assert said == [False, run.is_tool_call] == [False, is_tool_call]


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
async def test_an_answer_that_only_speaks_of_a_tool_call_keeps_nothing(cache: Running) -> None:
    spoken = '"finish_reason":"tool_calls" "stop_reason":"tool_use"'
    body: Body = {"model": "m", "messages": ASK, "structured_outputs": {"choice": [spoken]}}
    ids = await rendered(cache, CHATS, body)
    chunks = await chunks_of(cache, replace(request_of(CHATS, body, ids), keep=TOOLS))
    assert not any(chunk.http.is_tool_call for chunk in chunks if chunk.http)
    await evict(cache, cache.engine.facts.capacity_blocks // 2, keep=None)
    assert await ask(cache, [*ids.tolist(), 0], None) == 0
