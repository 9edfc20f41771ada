"""Adds hints that a session ends, which clients may send, to a trace that was recorded without."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replay.workload.trace import Request


@dataclass(frozen=True, slots=True)
class Ends:
    """How often clients send the hint that their session ends."""

    right: float = 0.0  # share of hints among the requests whose prompt no later request continues
    wrong: float = 0.0  # share of hints among all other requests


def with_ends(requests: Sequence[Request], ends: Ends, seed: int) -> list[Request]:
    """Add the hint to a random part of the requests."""
    rng, continued = random.Random(seed), set[Fingerprint]()
    hinted = []
    for request in reversed(requests):
        is_last = not request.reusable or request.reusable[-1] not in continued
        continued.update(request.blocks)
        share = ends.right if is_last else ends.wrong
        hinted.append(replace(request, is_end=True) if rng.random() < share else request)
    return hinted[::-1]
