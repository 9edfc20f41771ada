"""An answer that was cut goes on elsewhere as if nothing had happened: asked of the simulated
engine, and of vLLM with the whole built-in model, whose words these tests know."""

from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from kvroute.contract.generation import Chunk, EngineDeadError
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.vllm_engine.process.engine_health import STOPPED_CHECKS
from tests.support.answers import end_of, ids_of, logprobs_of, text_of
from tests.support.engines import Running, prompt_of, request_of, rest_of, started
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "vllm"])
async def whole_model(request: pytest.FixtureRequest) -> AsyncIterator[Running]:
    async with started(request.param) as running:
        yield running


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("🦜🐢" * 20, {"max_tokens": 12, "logprobs": 2}),
        ("one two three four " * 6, {"max_tokens": 20, "min_tokens": 4, "stop": "four one two"}),
        ("one two three four " * 6, {"max_tokens": 20, "frequency_penalty": 2.0}),
    ],
    ids=["logprobs", "stop", "penalty"],
)
async def test_an_answer_goes_on_elsewhere_wherever_it_was_cut(
    whole_model: Running, text: str, fields: dict[str, Any]
) -> None:
    """Also inside a character of several tokens, and inside a stop string."""
    tokenizer = Tokenizer.from_file(str(Path(resolve(BUILTIN_MODEL)) / "tokenizer.json"))
    request = request_of(tokenizer.encode(text).ids, **fields)
    whole = await whole_model.run(request)
    for cut in range(1, len(whole)):
        rest = await whole_model.run(rest_of(request, whole[:cut]))
        assert heard_in(whole[:cut] + rest) == heard_in(whole)


@pytest.mark.parametrize("whole_model", ["vllm"], indirect=True)
async def test_an_engine_whose_process_hangs_is_declared_dead(whole_model: Running) -> None:
    engine: Any = whole_model.engine
    engines = (process for process in engine._processes if "EngineCor" in process.name())
    process = max(engines, key=psutil.Process.create_time)  # others belong to other tests' engines
    await engine.check()
    process.suspend()
    await until(lambda: process.status() == psutil.STATUS_STOPPED)
    for _ in range(STOPPED_CHECKS - 1):
        await engine.check()
    with pytest.raises(EngineDeadError, match="its process is stopped"):
        await engine.check()
    process.resume()
    await engine.check()


def heard_in(chunks: list[Chunk]) -> tuple[object, ...]:
    """What a client makes of an answer."""
    tokens = [token for token, _ in logprobs_of(chunks)]
    return text_of(chunks), ids_of(chunks), tokens, end_of(chunks)


async def test_an_answer_that_is_complete_already_harms_no_other(whole_model: Running) -> None:
    request = request_of(prompt_of(30, seed=1), max_tokens=2)
    whole = await whole_model.run(request)
    rest = []
    with suppress(ValueError):  # vLLM's application reports it to the client instead
        rest = await whole_model.run(rest_of(request, whole))
    assert ids_of(rest) == []
    assert ids_of(await whole_model.run(request)) == ids_of(whole)
