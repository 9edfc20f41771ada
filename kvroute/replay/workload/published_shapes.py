"""Workloads of published benchmarks, made from their descriptions.

All of them are from llm-d/llm-d: `shared-prefix` from guides/optimized-baseline, the others from
the blog post of 4 August 2026. Blocks have 16 tokens, as by default in vLLM.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from itertools import count, cycle, islice

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import Request, TraceError

SHAPE_BLOCK_TOKENS = 16


class _Blocks:
    """Makes blocks that no other prompt has."""

    def __init__(self) -> None:
        self._numbers = count(1)

    def take(self, tokens: int) -> tuple[Fingerprint, ...]:
        """Return the blocks of a new text with this many tokens."""
        return tuple(map(Fingerprint, islice(self._numbers, tokens // SHAPE_BLOCK_TOKENS)))


def shared_prefix(
    requests: int, rng: random.Random, *, question: int = 1200, answer: int = 1000
) -> Iterator[Request]:
    """Yield requests with 150 shared prefixes of 6,000 tokens, each with 5 questions.

    The 750 prompts are shuffled once, and then sent again and again.

    Args:
        requests: number of requests.
        rng: random numbers.
        question: tokens of a question.
        answer: tokens of an answer.
    """
    blocks = _Blocks()
    prompts = []
    for _ in range(150):
        shared = blocks.take(6000)
        prompts += [shared + blocks.take(question) for _ in range(5)]
    rng.shuffle(prompts)
    arrival_s = 0.0
    for index, prompt in enumerate(islice(cycle(prompts), requests)):
        tokens = (6000 + question, answer)
        yield Request(index, arrival_s, *tokens, prompt, SHAPE_BLOCK_TOKENS)
        arrival_s += rng.expovariate(1.0)


def code_generation(requests: int, rng: random.Random) -> Iterator[Request]:
    """Yield conversations with long system prompts, of 2 to 20 turns.

    A system prompt has 3,000 to 100,000 tokens, 55,000 on average. Each turn adds 1,500 tokens, and
    each answer has 800, which are a part of the next prompt. Turns follow at once.
    """
    blocks, index = _Blocks(), count()
    for session in count():
        tokens = round(min(100_000, max(3_000, rng.gauss(55_000, 20_000))))
        prompt = blocks.take(tokens)
        for _ in range(rng.randint(2, 20)):
            if (number := next(index)) == requests:
                return
            tokens += 1_500
            prompt += blocks.take(tokens - len(prompt) * SHAPE_BLOCK_TOKENS)
            yield Request(
                *(number, float(number), tokens, 800, prompt, SHAPE_BLOCK_TOKENS),
                session=str(session),
            )
            tokens += 800


def reasoning(requests: int, rng: random.Random) -> Iterator[Request]:
    """Yield short prompts with long answers: 250 shared and 1,000 own tokens, and 8,000 tokens."""
    blocks = _Blocks()
    shared = blocks.take(250)
    for index in range(requests):
        prompt = shared + blocks.take(1000)
        yield Request(
            *(index, float(index), 1250, 8000, prompt, SHAPE_BLOCK_TOKENS), session=str(index)
        )


SHAPES: Mapping[str, Callable[[int, random.Random], Iterator[Request]]] = {
    "shared-prefix": shared_prefix,
    "code-generation": code_generation,
    "reasoning": reasoning,
}


def shaped(name: str, requests: int, seed: int) -> list[Request]:
    """Return the requests of a shape.

    Raises:
        TraceError: There is no such shape.
    """
    if name not in SHAPES:
        raise TraceError(f"--shape is {name!r}; expected one of {', '.join(SHAPES)}")
    return [*SHAPES[name](requests, random.Random(seed))]
