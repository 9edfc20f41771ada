"""Answers in chunks of several tokens: asked of the simulated engine and of vLLM."""

import pytest

from kvroute.contract.generation import Chunk
from tests.support.answers import choices_of, ids_of, text_of
from tests.support.engines import INTERVAL, Running, prompt_of, request_of, rest_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def assert_in_chunks(chunks: list[Chunk], tokens: int, index: int = 0) -> None:
    """Its first token may stand alone, and what is left at the end; a client that is late gets more
    at once."""
    lengths = [len(each["logprobs"]["tokens"]) for each in choices_of(chunks, index)]
    assert sum(lengths) == tokens
    assert len(lengths) <= 3
    assert all(length >= INTERVAL for length in lengths[1:-1])


async def test_several_tokens_come_at_once(running: Running) -> None:
    chunks = await running.ask(prompt_of(40, seed=61), max_tokens=6, logprobs=1)
    assert_in_chunks(chunks, 6)


async def test_so_do_those_of_each_of_several_choices(running: Running) -> None:
    prompt = prompt_of(40, seed=62)
    chunks = await running.ask(prompt, max_tokens=6, n=2, temperature=1, logprobs=1)
    for index in range(2):
        assert_in_chunks(chunks, 6, index)


async def test_an_answer_goes_on_elsewhere_without_what_was_sent(running: Running) -> None:
    request = request_of(prompt_of(40, seed=63), max_tokens=10, logprobs=1)
    whole = await running.run(request)
    for cut in range(1, len(whole)):
        rest = await running.run(rest_of(request, whole[:cut]))
        assert ids_of(whole[:cut] + rest) == ids_of(whole)
        assert text_of(whole[:cut] + rest) == text_of(whole)


@pytest.mark.parametrize("running", ["vllm"], indirect=True)
async def test_a_whole_answer_comes_in_few_chunks(running: Running) -> None:
    """Each costs time on its way; together they are what a lost replica would cost."""
    chunks = await running.ask(prompt_of(40, seed=64), max_tokens=70, stream=False)
    assert sum(len(chunk.token_ids) for chunk in chunks) == 70
    assert len(chunks) <= 4
