"""Batches with what real ones share, as requests of a replay: documents with questions, and so on.

The lines are shuffled, and then sorted as `kvroute batch` sorts them.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate

from kvroute.batch.lines import BatchLine
from kvroute.batch.order import Sorter
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import Request

Segment = tuple[str, int]  # a name that stands for a text, and its length in tokens
Line = tuple[Sequence[Segment], int]  # the segments of a prompt, and the tokens of its answer


def documents(seed: int, documents: int = 200, questions: int = 10) -> list[Line]:
    """Return questions about documents, which follow one system prompt."""
    rng = random.Random(f"documents/{seed}")
    lines: list[Line] = []
    for _ in range(documents):
        size = min(32_000, max(2_000, int(rng.lognormvariate(9.2, 0.6))))
        document = _name(rng), size
        for _ in range(questions):
            question = _name(rng), rng.randint(30, 120)
            lines.append((((SYSTEM, 192), document, question), rng.randint(50, 300)))
    rng.shuffle(lines)
    return lines


def unshared(seed: int, count: int = 6000) -> list[Line]:
    """Return prompts that share nothing."""
    rng = random.Random(f"unshared/{seed}")
    return [(((_name(rng), rng.randint(200, 3000)),), rng.randint(50, 250)) for _ in range(count)]


def few_shot(seed: int, templates: int = 20, items: int = 500) -> list[Line]:
    """Return items to classify, each after the examples of its task."""
    rng = random.Random(f"few_shot/{seed}")
    lines: list[Line] = []
    for _ in range(templates):
        examples = _name(rng), rng.randint(1500, 4000)
        for _ in range(items):
            lines.append(((examples, (_name(rng), rng.randint(50, 300))), rng.randint(2, 8)))
    rng.shuffle(lines)
    return lines


SYSTEM = "system"
BATCHES: Mapping[str, Callable[[int], list[Line]]] = {
    "documents": documents,
    "few-shot": few_shot,
    "unshared": unshared,
}


def in_order(lines: Sequence[Line]) -> list[Line]:
    """Return the lines in the order in which `kvroute batch` sends them."""
    sorter = Sorter()
    for number, (segments, _) in enumerate(lines):
        text = " ".join(name for name, _ in segments)
        sorter.add(BatchLine(str(number), "/v1/completions", {"prompt": text}))
    return [lines[index] for index in sorter.order()]


def requests(lines: Sequence[Line], *, block_tokens: int, first: int = 0) -> list[Request]:
    """Return the lines as batch requests that arrive at 0 s.

    Args:
        lines: the lines.
        block_tokens: tokens of a block.
        first: index of the first request.
    """
    rng, known = random.Random(0), dict[tuple[object, ...], Fingerprint]()
    made = []
    for index, (segments, output_tokens) in enumerate(lines, start=first):
        ends = [*accumulate(length for _, length in segments)]
        blocks: list[Fingerprint] = []
        for end in range(block_tokens, ends[-1] + 1, block_tokens):
            inside = tuple(
                name
                for (name, length), stop in zip(segments, ends, strict=True)
                if stop > end - block_tokens and stop - length < end
            )
            key = (blocks[-1] if blocks else 0, inside)
            blocks.append(known.setdefault(key, Fingerprint(rng.getrandbits(62) | 1 << 62)))
        made.append(
            Request(index, 0.0, ends[-1], output_tokens, tuple(blocks), block_tokens, is_batch=True)
        )
    return made


def _name(rng: random.Random) -> str:
    return f"{rng.getrandbits(64):016x}"
