"""Traffic that no public trace has enough of, as traces for `kvroute replay`: agents, documents.

`python -m tests.support.traces agents 7 >agents.jsonl` writes one, with its seed.
"""

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import count

from kvroute.contract.fingerprint import Fingerprint
from kvroute.replay.trace import BLOCK_TOKENS, Request

SPAN_S = 900.0  # of a trace
BEFORE_S = 600.0  # it begins with what started in this time before, under way
LONGEST_TOKENS = 180_000


@dataclass
class Text:
    """A prompt that grows; what is added is new, so nobody else has its blocks."""

    fresh: Iterator[int]  # ids of blocks
    tokens: int = 0
    blocks: list[Fingerprint] = field(default_factory=list)

    def add(self, tokens: int) -> "Text":
        self.tokens += tokens
        while len(self.blocks) < self.tokens // BLOCK_TOKENS:
            self.blocks.append(Fingerprint(next(self.fresh)))
        return self

    def copy(self) -> "Text":
        """Goes on from the same blocks; shared are the full ones."""
        return Text(self.fresh, self.tokens, list(self.blocks))

    def request(self, at_s: float, output_tokens: int, session: str) -> Request:
        return Request(0, at_s, self.tokens, output_tokens, tuple(self.blocks), session=session)


def agents(seed: int, *, sessions: int = 900) -> list[Request]:
    """Coding agents: one of a few long prompts with tools, a repository of the
    session's own, and turns that each add what a tool said. Now and then a person answers."""
    rng, fresh = random.Random(seed), count(1)
    products = [Text(fresh).add(rng.randrange(8, 40) * BLOCK_TOKENS) for _ in range(5)]
    requests = []
    for number in range(sessions):
        text, at_s = rng.choice(products).copy(), rng.uniform(-BEFORE_S, SPAN_S)
        text.add(_size(rng, 12_000, most=60_000))
        for _ in range(1 + int(rng.expovariate(1 / 20))):
            if text.tokens > LONGEST_TOKENS:
                break
            output_tokens = _size(rng, 150, most=4000)
            requests.append(text.request(at_s, output_tokens, str(number)))
            text.add(output_tokens + _size(rng, 1200, most=30_000))
            at_s += 5 + rng.expovariate(1 / 10 if rng.random() < 0.9 else 1 / 120)
    return _in_order(requests)


def documents(seed: int, *, visits: int = 6000) -> list[Request]:
    """Questions about long documents, some asked about far more often than others: a
    visit has a few questions, and each brings the whole document and no earlier answer."""
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


WORKLOADS: Mapping[str, Callable[[int], list[Request]]] = {"agents": agents, "documents": documents}


def lines(requests: list[Request]) -> Iterator[str]:
    """In Mooncake's format."""
    for request in requests:
        yield json.dumps(
            {
                "timestamp": 1000 * request.arrival_s,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": [block - 1 for block in request.blocks],
                "session": request.session,
            }
        )


def _size(rng: random.Random, middle: int, *, most: int) -> int:
    """Tokens: as often below the middle as above, and sometimes far above."""
    return max(1, min(most, int(middle * rng.lognormvariate(0, 1))))


def _in_order(requests: list[Request]) -> list[Request]:
    """Those within the span, from the first on."""
    requests = [each for each in requests if 0 <= each.arrival_s < SPAN_S]
    requests.sort(key=lambda request: request.arrival_s)
    first_s = requests[0].arrival_s
    return [
        replace(request, index=index, arrival_s=request.arrival_s - first_s)
        for index, request in enumerate(requests)
    ]


if __name__ == "__main__":
    name, number = sys.argv[1:]
    print(*lines(WORKLOADS[name](int(number))), sep="\n")
