"""Pooling models: embeddings, scores and classes are those of vLLM's own server."""

import asyncio
import base64
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from kvroute.contract.generation import NO_TOKENS, Chunk, EngineDeadError, GenerateRequest
from kvroute.contract.http_call import HttpCall
from tests.support.answers import data_of, status_of
from tests.support.bodies import ASK, CHATS, Body, comparable
from tests.support.chunks import collected, streamed
from tests.support.engines import SHALLOW_CACHE_MB, shallow_model, started
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

EMBEDDINGS = "/v1/embeddings"
LONG = "a word " * 400
MEAN = {"seq_pooling_type": "MEAN"}
ENGINES: dict[str, Body] = {
    "embed": {"convert": "embed"},
    "mean": {"convert": "embed", "pooler_config": MEAN},
    "classify": {"convert": "classify"},
}

EMBEDDED: list[Body] = [
    {"input": "hi"},
    {"input": ["hi", "ho", LONG]},
    {"input": [1, 2, 3]},
    {"input": [[1, 2], [3]]},
    {"input": "hi", "encoding_format": "base64"},
    {"input": "hi", "encoding_format": "float", "user": "somebody", "unknown_field": 1},
    {"input": LONG * 2, "truncate_prompt_tokens": 8},
    {"messages": ASK},
    # refused
    {"input": "hi", "dimensions": 8},
    {"input": "hi", "encoding_format": "roman"},
    {"input": "hi", "model": "other"},
    {"input": LONG * 4},
    {"input": [10_000_000]},
    {"input": []},
    {"input": {}},
    {},
]
TEXTS = ["a cat", "a dog"]
SCORED: list[tuple[str, Body]] = [
    (path, body)
    for path in ("/score", "/v1/score")
    for body in ({"text_1": "hi", "text_2": TEXTS}, {"text_1": TEXTS, "text_2": TEXTS}, {})
]
RANKED: list[tuple[str, Body]] = [
    (path, body)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank")
    for body in (
        {"query": "hi", "documents": TEXTS},
        {"query": "hi", "documents": TEXTS, "top_n": 1},
        {"query": "hi", "documents": "none"},
    )
]
COHERE = "/v2/embed"
COHERE_EMBEDDED: list[Body] = [
    {"texts": TEXTS, "input_type": "classification", "embedding_types": ["float", "base64"]},
    {"texts": [LONG * 4], "truncate": "START"},
    {"inputs": [{"content": [{"type": "text", "text": "hi"}]}], "embedding_types": ["ubinary"]},
    # refused
    {"texts": [LONG * 4], "truncate": "NONE"},
    {"texts": TEXTS, "output_dimension": 8},
    {"texts": TEXTS, "embedding_types": ["int3"]},
    {"texts": []},
    {},
]
CLASSIFIED: list[Body] = [{"input": "hi"}, {"input": TEXTS}, {"input": {}}, {}]
CALLS = [
    *((EMBEDDINGS, body) for body in EMBEDDED),
    *((COHERE, body) for body in COHERE_EMBEDDED),
    *SCORED,
    *RANKED,
    *(("/classify", body) for body in CLASSIFIED),
    ("/pooling", {"input": "hi"}),
    ("/pooling", {"input": 1}),
]


DECIMAL = re.compile(r"-?\d+(?:\.\d+(?:e-?\d+)?|e-\d+)")


@dataclass
class Pooling:
    """An engine of such a model, and vLLM's own application on it."""

    kind: str
    engine: Any
    stock: Callable[[str, Body], Awaitable[tuple[int, bytes]]]

    async def chunks(self, path: str, body: Body) -> list[Chunk]:
        call = HttpCall(path, json.dumps(body).encode(), 1.0, is_rendered=False)
        request = GenerateRequest("id-1", NO_TOKENS, call=call)
        return await collected(self.engine.generate, request)

    async def embedding(self, text: str) -> Any:
        answer = await self.chunks(EMBEDDINGS, {"model": "m", "input": text})
        return np.array(json.loads(data_of(answer))["data"][0]["embedding"])


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=ENGINES)
async def pooling(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Pooling]:
    from tests.support.stock import stock_answer, stock_app

    folder = tmp_path_factory.mktemp("pooling") / "model"
    async with started(
        "vllm",
        model=str(shallow_model(folder)),
        kv_cache_memory_mb=SHALLOW_CACHE_MB,
        engine_args={"runner": "pooling", **ENGINES[request.param]},
    ) as running:
        engine: Any = running.engine
        app = await stock_app(engine._llm, await engine._llm.get_supported_tasks())
        yield Pooling(request.param, engine, partial(stock_answer, app))
        del engine, app


def is_alike(one: bytes, other: bytes) -> bool:
    """A number's last digits depend on what was cached."""
    texts = [DECIMAL.sub("0.0", comparable(each)) for each in (one, other)]
    ours, theirs = [list(map(float, DECIMAL.findall(each.decode()))) for each in (one, other)]
    return texts[0] == texts[1] and np.allclose(ours, theirs, atol=1e-3)


async def test_it_answers_as_vllms_own_server(pooling: Pooling) -> None:
    """What the model can, what it cannot, and what nobody can."""
    differing, answered = [], set()
    for path, body in CALLS:
        body = {"model": "m", **body}
        ours = await pooling.chunks(path, body)
        status, data = await pooling.stock(path, body)
        answered |= {path} if status == 200 else set()
        if status_of(ours) != status or not is_alike(data_of(ours), data):
            differing.append((path, body, data_of(ours)[-300:], data[-300:]))
    assert differing == []
    scored = {path for path, _ in (*SCORED, *RANKED)}
    can = {"/classify"} if pooling.kind == "classify" else {EMBEDDINGS, COHERE} | scored
    assert answered == can | {"/pooling"}


async def test_the_whole_answer_is_one_chunk(pooling: Pooling) -> None:
    (chunk,) = await pooling.chunks("/pooling", {"model": "m", "input": ["hi", "ho"]})
    assert chunk.is_last
    assert not chunk.token_ids
    assert chunk.http
    assert (chunk.http.status, chunk.http.content_type) == (200, "application/json")


async def test_a_chat_is_refused_as_vllm_refuses_it(pooling: Pooling) -> None:
    body = {"model": "m", "messages": ASK}
    ours = await pooling.chunks(CHATS, body)
    assert (status_of(ours), data_of(ours)) == await pooling.stock(CHATS, body)
    assert status_of(ours) == 404


async def test_an_embedding_is_the_same_behind_a_cached_prefix(pooling: Pooling) -> None:
    if pooling.kind == "classify":
        pytest.skip("it has no embeddings")
    assert pooling.engine.facts.prefix_caching == (pooling.kind == "embed")
    first, again = await pooling.embedding(LONG), await pooling.embedding(LONG)
    assert np.allclose(first, again, atol=1e-4)


async def test_base64_has_the_same_numbers(pooling: Pooling) -> None:
    if pooling.kind == "classify":
        pytest.skip("it has no embeddings")
    body = {"model": "m", "input": "hi", "encoding_format": "base64"}
    answer = json.loads(data_of(await pooling.chunks(EMBEDDINGS, body)))
    numbers = np.frombuffer(base64.b64decode(answer["data"][0]["embedding"]), "<f4")
    assert np.allclose(numbers, await pooling.embedding("hi"), atol=1e-4)


async def test_nothing_runs_for_a_client_that_has_left(pooling: Pooling) -> None:
    states = pooling.engine._llm.output_processor.request_states
    body = {"model": "m", "input": [f"{number} {LONG}" for number in range(200)]}
    asking = asyncio.create_task(pooling.chunks("/pooling", body))
    await until(lambda: len(states) > 0)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert asking.cancelled()
    assert not states


async def test_a_dead_engine_is_reported_and_not_answered(
    pooling: Pooling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that another replica answers."""
    from vllm.v1.engine.exceptions import EngineDeadError as VllmDeadError

    async def dead(*_: Any, **__: Any) -> None:
        raise VllmDeadError

    monkeypatch.setattr(pooling.engine._llm, "add_request", dead)
    with pytest.raises(EngineDeadError):
        await pooling.chunks("/pooling", {"model": "m", "input": "hi"})


async def test_tokens_that_nobody_reads_are_refused(pooling: Pooling) -> None:
    """Those of a named prefix and of a canary; the replica goes on."""
    ids = np.arange(64, dtype=np.uint32)
    with pytest.raises(ValueError, match="does not support generation"):
        async for _ in streamed(pooling.engine.generate, GenerateRequest("r-1", ids)):
            pass
