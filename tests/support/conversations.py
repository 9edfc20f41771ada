"""Small traces for the replay."""

import random

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import BLOCK_TOKENS, Request


def request(
    index: int, blocks: list[int], output_tokens: int = 1, *, rest: int = 1, at_s: float = 0.0
) -> Request:
    """Return a request whose prompt has these full blocks and `rest` more tokens."""
    chain = tuple(Fingerprint(block) for block in blocks)
    return Request(index, at_s, len(blocks) * BLOCK_TOKENS + rest, output_tokens, chain)


def conversations(count: int = 60, turns: int = 4, seed: int = 0) -> list[Request]:
    """Return the requests of chats that share a system prompt.

    The prompt of each turn begins with the prompt of the turn before it.
    """
    rng = random.Random(seed)
    times_s = sorted(rng.uniform(0, 60) for _ in range(count * turns))
    chats = [[1] for _ in range(count)]
    requests = []
    for index, at_s in enumerate(times_s):
        chat = chats[rng.randrange(count)]
        chat += [1000 * (index + 1) + i for i in range(rng.randrange(1, 12))]
        requests.append(request(index, chat, rng.randrange(1, 200), rest=7, at_s=at_s))
    return requests
