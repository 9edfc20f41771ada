"""What clients may say of their sessions' ends, in a replay of a trace that does not have it."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import Request


@dataclass(frozen=True, slots=True)
class Ends:
    """Shares of requests that say that their session ends."""

    right: float = 0.0  # of those on which no later prompt of the trace goes on
    wrong: float = 0.0  # of all others


def with_ends(requests: Sequence[Request], ends: Ends, seed: int) -> list[Request]:
    """The same requests; some say that their session ends."""
    rng, goes_on = random.Random(seed), set[Fingerprint]()
    told = []
    for request in reversed(requests):
        is_last = not request.reusable or request.reusable[-1] not in goes_on
        goes_on.update(request.blocks)
        share = ends.right if is_last else ends.wrong
        told.append(replace(request, is_end=True) if rng.random() < share else request)
    return told[::-1]
