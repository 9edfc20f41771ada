"""Generates traces for `kvroute replay`, of kinds of traffic that are rare in public traces.

`python -m tests.support.traces agents 7 >agents.jsonl` writes a trace with seed 7. Traces that are
made from recorded chats also need a trace of these chats: `... mix 7 conversation_trace.jsonl`.
"""

import json
import math
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request, read

SPAN_S = 900.0  # length of a trace in seconds
# Sessions start up to this many seconds before the trace, so that some are running at its start.
BEFORE_S = 600.0
LONGEST_TOKENS = 180_000  # length of a prompt at which a session ends, in tokens
BATCH_PER_S = 6.0  # in a mix: prompts of a batch job per second
AGENTS_PER_S = 0.09  # in a mix: sessions of agents that start per second


@dataclass
class Text:
    """A prompt that grows. Text that is added is new, so no other prompt has its blocks."""

    fresh: Iterator[int]  # yields unused ids of blocks
    tokens: int = 0
    blocks: list[Fingerprint] = field(default_factory=list)

    def add(self, tokens: int) -> "Text":
        self.tokens += tokens
        while len(self.blocks) < self.tokens // BLOCK_TOKENS:
            self.blocks.append(Fingerprint(next(self.fresh)))
        return self

    def copy(self) -> "Text":
        """Return a prompt that begins with the full blocks of this one."""
        return Text(self.fresh, self.tokens, list(self.blocks))

    def request(
        self, at_s: float, output_tokens: int, session: str, *, has_tools: bool = False
    ) -> Request:
        return Request(
            *(0, at_s, self.tokens, output_tokens, tuple(self.blocks)),
            session=session,
            has_tools=has_tools,
        )


def agents(seed: int, *, sessions: int = 900, span_s: float = SPAN_S) -> list[Request]:
    """Return the requests of coding agents.

    A session begins with one of a few long system prompts with tools, and with a repository that
    only this session has. Each turn adds a tool's result. Sometimes a turn waits for a person.
    """
    rng, fresh = random.Random(seed), count(1)
    products = [Text(fresh).add(rng.randrange(8, 40) * BLOCK_TOKENS) for _ in range(5)]
    requests = []
    for number in range(sessions):
        text, at_s = rng.choice(products).copy(), rng.uniform(-BEFORE_S, span_s)
        text.add(_size(rng, 12_000, most=60_000))
        turns = 1 + int(rng.expovariate(1 / 20))
        for turn in range(turns):
            if text.tokens > LONGEST_TOKENS:
                break
            output_tokens = _size(rng, 150, most=4000)
            is_tool_call = turn + 1 < turns and rng.random() < 0.9
            requests.append(text.request(at_s, output_tokens, str(number), has_tools=True))
            text.add(output_tokens + _size(rng, 1200, most=30_000))
            at_s += 5 + rng.expovariate(1 / 10 if is_tool_call else 1 / 120)
    return _in_order(requests, span_s)


def rollouts(seed: int, *, sessions: int = 600) -> list[Request]:
    """Return the requests of coding agents that all start together, as in reinforcement learning.

    The numbers of turns are like those in the replay of pull request 3663 of NVIDIA's NeMo-RL: 5 to
    99, with a median of 29 and a 90th percentile of 56. The length of a turn and the time of tools
    are assumptions.
    """
    rng, fresh = random.Random(seed), count(1)
    system = Text(fresh).add(6 * BLOCK_TOKENS)
    # Standard deviation of the logarithm of the number of turns. 1.2816 is the 90th percentile of
    # the standard normal distribution.
    spread = math.log(56 / 29) / 1.2816
    requests = []
    for number in range(sessions):
        text, at_s = system.copy().add(_size(rng, 3000, most=20_000)), 0.001 * number
        for _ in range(min(99, max(5, round(29 * rng.lognormvariate(0, spread))))):
            output_tokens = _size(rng, 150, most=2000)
            requests.append(text.request(at_s, output_tokens, str(number), has_tools=True))
            text.add(output_tokens + _size(rng, 600, most=8000))
            at_s += 2 + rng.expovariate(1 / 3)
    return _in_order(requests, math.inf)


def fan_outs(
    seed: int, *, families: int = 80, width: tuple[int, int] = (2, 20), least: int = 1
) -> list[Request]:
    """Return the requests of families of sub-agents.

    All sub-agents of a family start at the same time with a long common prefix, which no request
    has computed before. Then each continues alone.

    Args:
        seed: The seed of the random numbers.
        families: The number of families.
        width: The minimum and maximum number of sub-agents in a family.
        least: The minimum length of a prefix in tokens. The maximum is 100,000.
    """
    rng, fresh = random.Random(seed), count(1)
    requests = []
    for family in range(families):
        tokens, start_s = max(least, _size(rng, 20_000, most=100_000)), rng.uniform(0, SPAN_S)
        prefix = Text(fresh).add(tokens)
        for member in range(rng.randint(*width)):
            text, at_s = (
                prefix.copy().add(_size(rng, 500, most=4000)),
                start_s + rng.uniform(0, 0.1),
            )
            for _ in range(1 + int(rng.expovariate(1 / 4))):
                output_tokens = _size(rng, 150, most=2000)
                requests.append(text.request(at_s, output_tokens, f"{family}/{member}"))
                text.add(output_tokens + _size(rng, 1200, most=30_000))
                at_s += 3 + rng.expovariate(1 / 10)
    return _in_order(requests, math.inf)


def documents(seed: int, *, visits: int = 6000) -> list[Request]:
    """Return questions about long documents. Some documents are much more popular than others.

    A visit has a few questions. Each prompt contains the document, but no earlier answer.
    """
    rng, fresh = random.Random(seed), count(1)
    system = Text(fresh).add(2 * BLOCK_TOKENS)
    library = [system.copy().add(_size(rng, 20_000, most=120_000)) for _ in range(1000)]
    popularity = [1 / rank for rank in range(1, len(library) + 1)]
    requests = []
    for number, text in enumerate(rng.choices(library, popularity, k=visits)):
        at_s = rng.uniform(-BEFORE_S, SPAN_S)
        for _ in range(rng.randrange(1, 6)):
            question = text.copy().add(_size(rng, 100, most=2000))
            requests.append(question.request(at_s, _size(rng, 250, most=2000), str(number)))
            at_s += 10 + rng.expovariate(1 / 40)
    return _in_order(requests)


def chats(seed: int, *, talks: int = 3000) -> list[Request]:
    """Return the chats of an online service.

    They have the same short system prompt, messages that may contain a long document, and few
    turns.
    """
    rng, fresh = random.Random(seed), count(1)
    system = Text(fresh).add(BLOCK_TOKENS)
    requests = []
    for number in range(talks):
        text, at_s = system.copy(), rng.uniform(-BEFORE_S, SPAN_S)
        for _ in range(1 + int(rng.expovariate(1.0))):
            text.add(_size(rng, 4500, most=100_000))
            output_tokens = _size(rng, 250, most=2000)
            requests.append(text.request(at_s, output_tokens, str(number)))
            text.add(output_tokens)
            at_s += 10 + rng.expovariate(1 / 60)
    return _in_order(requests)


def mix(seed: int, recorded: Path | None = None) -> list[Request]:
    """Return chats, agents, and a batch job whose prompts have nothing in common."""
    talks = read(recorded, limit=None, seed=seed) if recorded else chats(seed)
    span_s = talks[-1].arrival_s
    rng, fresh = random.Random(seed), count(1)
    job = [
        Text(fresh).add(_size(rng, 4000, most=30_000)).request(at_s, _size(rng, 200, most=2000), "")
        for at_s in _arrivals(rng, span_s, BATCH_PER_S)
    ]
    coders = agents(seed, sessions=int(AGENTS_PER_S * (span_s + BEFORE_S)), span_s=span_s)
    return _together([talks, coders, job], span_s)


def clones(seed: int, recorded: Path) -> list[Request]:
    """Return recorded chats four times: with other prompts each time, and with the same pauses."""
    copies = [read(recorded, limit=None, seed=seed + number) for number in range(4)]
    return _together(copies, max(copy[-1].arrival_s for copy in copies) + 1)


def _arrivals(rng: random.Random, span_s: float, per_s: float) -> Iterator[float]:
    at_s = rng.expovariate(per_s)
    while at_s < span_s:
        yield at_s
        at_s += rng.expovariate(per_s)


def _together(traces: Sequence[Sequence[Request]], span_s: float) -> list[Request]:
    """Combine traces into one. Their blocks are renumbered, so that they share none."""
    count = len(traces)
    return _in_order(
        [
            replace(
                request,
                blocks=tuple(Fingerprint(block * count + number) for block in request.blocks),
                session=request.session and f"{number}/{request.session}",
            )
            for number, trace in enumerate(traces)
            for request in trace
        ],
        span_s,
    )


def example(seed: int, *, talks: int = 150) -> list[Request]:
    """Return the trace of `kvroute replay --example`: chats of five applications.

    Each application has its own system prompt.
    """
    rng, fresh = random.Random(seed), count(1)
    systems = [Text(fresh).add(_size(rng, 3000, most=8000)) for _ in range(5)]
    requests = []
    for number in range(talks):
        text, at_s = rng.choice(systems).copy(), rng.uniform(0, SPAN_S)
        for _ in range(1 + int(rng.expovariate(1 / 3))):
            text.add(_size(rng, 500, most=4000))
            output_tokens = _size(rng, 200, most=1000)
            requests.append(text.request(round(at_s, 3), output_tokens, str(number)))
            text.add(output_tokens)
            at_s += 5 + rng.expovariate(1 / 30)
    in_order = _in_order(requests, math.inf)
    return [replace(request, arrival_s=round(request.arrival_s, 3)) for request in in_order]


WORKLOADS: Mapping[str, Callable[[int], list[Request]]] = {
    "agents": agents,
    "chats": chats,
    "documents": documents,
    "example": example,
    "fan-outs": fan_outs,
    "rollouts": rollouts,
}
OF_CHATS: Mapping[str, Callable[[int, Path], list[Request]]] = {"mix": mix, "clones": clones}


def lines(requests: Sequence[Request]) -> Iterator[str]:
    """Yield the requests as lines in Mooncake's format."""
    for request in requests:
        yield json.dumps(
            {
                "timestamp": 1000 * request.arrival_s,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": [block - 1 for block in request.blocks],
                "session": request.session,
                "tools": request.has_tools,
            }
        )


def _size(rng: random.Random, median: int, *, most: int) -> int:
    """Draw a number of tokens from a log-normal distribution with this median and maximum."""
    return max(1, min(most, int(median * rng.lognormvariate(0, 1))))


def _in_order(requests: list[Request], span_s: float = SPAN_S) -> list[Request]:
    """Return the requests within the span, sorted; the first one arrives at 0 s."""
    requests = [request for request in requests if 0 <= request.arrival_s < span_s]
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [
        replace(request, index=index, arrival_s=request.arrival_s - first_s)
        for index, request in enumerate(requests)
    ]


if __name__ == "__main__":
    name, number, *files = sys.argv[1:]
    trace = OF_CHATS[name](int(number), Path(*files)) if files else WORKLOADS[name](int(number))
    print(*lines(trace), sep="\n")
