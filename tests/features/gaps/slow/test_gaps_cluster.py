"""Streams of real engines while a long prompt is computed, without and with a limit."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from tests.bench.timed_chat import TimedAnswer, timed_chat
from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import until

STREAMS, REPLICAS = 8, 2
TOKENS = 150  # of each stream
PROMPT_WORDS, PROMPT_TOKENS = 1100, 4000  # words of the long prompt, and the least of its tokens
OPTIONS = ("--replicas", f"{REPLICAS}", "--max-model-len", "6000")
# Steps of these engines take longer than a GPU's. The prompt may take as long as it needs.
LIMIT = ("--slo-tpot-ms", "200", "--slo-ttft-ms", "120000")


@contextmanager
def running(*options: str) -> Iterator[Cluster]:
    with start_cluster(*OPTIONS, *options) as cluster:
        asyncio.run(streams_with_a_prompt(cluster, "warms up"))
        yield cluster


async def streams_with_a_prompt(cluster: Cluster, mark: str) -> list[TimedAnswer]:
    """Run the streams, and send a long prompt when all of them run; return their answers."""
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", timeout=600) as client:
        model = (await client.models.list()).data[0].id
        begun = list[str]()

        async def ask(content: str, tokens: int) -> TimedAnswer:
            message: ChatCompletionMessageParam = {"role": "user", "content": content}
            on_begin = partial(begun.append, content)
            return await timed_chat(client, model, [message], tokens, on_begin=on_begin)

        stories = (f"{mark} {number}. Tell a long story." for number in range(STREAMS))
        answers = [asyncio.create_task(ask(story, TOKENS)) for story in stories]
        await until(lambda: len(begun) == STREAMS)
        long = await ask(" ".join(f"{mark}{number}" for number in range(PROMPT_WORDS)), 1)
        assert long.usage is not None
        assert long.usage.prompt_tokens > PROMPT_TOKENS
        return [await answer for answer in answers]


def longest_gap_s(answers: list[TimedAnswer]) -> float:
    return max(b - a for answer in answers for a, b in pairwise(answer.times_s))


@pytest.fixture(scope="module")
def gaps_s() -> dict[str, float]:
    longest = {}
    for name, options in (("today", ()), ("limit", LIMIT)):
        with running(*options) as cluster:
            longest[name] = longest_gap_s(asyncio.run(streams_with_a_prompt(cluster, "measured")))
    print(longest)
    return longest


def test_the_longest_gap_is_at_most_half_as_long(gaps_s: dict[str, float]) -> None:
    assert gaps_s["limit"] <= gaps_s["today"] / 2, gaps_s
