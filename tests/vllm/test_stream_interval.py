"""Answers in chunks of several tokens: asked of the simulated engine and of vLLM."""

from dataclasses import replace

import pytest

from kvroute.contract.generation import Chunk, Sampling
from tests.support.engines import GREEDY, INTERVAL, Running, ids_of, prompt_of, request_of, text_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
    pytest.mark.timeout(240),
]

LOGPROBS = replace(GREEDY, max_tokens=10, logprobs=1)


def assert_in_chunks(chunks: list[Chunk], tokens: int) -> None:
    """Its first token may stand alone, and what is left at the end; a client that is late gets more
    at once."""
    lengths = [len(chunk.token_ids) for chunk in chunks]
    assert sum(lengths) == tokens
    assert len(lengths) <= 3
    assert all(length >= INTERVAL for length in lengths[1:-1])
    assert [len(chunk.logprobs) for chunk in chunks] == lengths


async def test_several_tokens_come_at_once(running: Running) -> None:
    chunks = await running.ask(prompt_of(40, seed=61), replace(LOGPROBS, max_tokens=6))
    assert_in_chunks(chunks, 6)


async def test_so_do_those_of_each_of_several_choices(running: Running) -> None:
    sampling = Sampling(max_tokens=6, n=2, ignore_eos=True, logprobs=1)
    chunks = await running.ask(prompt_of(40, seed=62), sampling)
    for index in range(2):
        assert_in_chunks([chunk for chunk in chunks if chunk.index == index], 6)


async def test_an_answer_goes_on_elsewhere_without_what_was_sent(running: Running) -> None:
    request = request_of(prompt_of(40, seed=63), LOGPROBS)
    whole = await running.run(request)
    for cut in range(1, len(whole)):
        rest = await running.run(request.after(ids_of(whole[:cut])))
        assert ids_of(whole[:cut] + rest) == ids_of(whole)
        assert text_of(whole[:cut] + rest) == text_of(whole)
