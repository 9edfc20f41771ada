"""Orders of replicas that know nothing of caches, to compare ours with on a live cluster.

Each gets the candidates that ours would get and orders them all: when the first refuses a request,
the next one is asked. Load is unanswered requests, those of other routers included.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from router.routing.policy import Candidate, rank


class Ranking(Protocol):
    """Every candidate, the best first. `forks`: as in `router.routing.policy`."""

    def __call__(
        self, candidates: Sequence[Candidate], *, forks: float, rng: random.Random
    ) -> list[Candidate]: ...


class RoundRobin:
    """Each replica in turn; every router has its own."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(
        self, candidates: Sequence[Candidate], *, forks: float, rng: random.Random
    ) -> list[Candidate]:
        self._turn += 1
        first = self._turn % max(1, len(candidates))
        in_order = sorted(candidates, key=lambda candidate: candidate.replica_id)
        return in_order[first:] + in_order[:first]


def power_of_two(
    candidates: Sequence[Candidate], *, forks: float, rng: random.Random
) -> list[Candidate]:
    """The less loaded of two at random, as Ray Serve's PowerOfTwoChoicesRequestRouter."""
    shuffled = rng.sample(candidates, len(candidates))
    return sorted(shuffled[:2], key=_unanswered) + shuffled[2:]


def least_loaded(
    candidates: Sequence[Candidate], *, forks: float, rng: random.Random
) -> list[Candidate]:
    """The fewest unanswered requests; by chance where several have them."""
    return sorted(rng.sample(candidates, len(candidates)), key=_unanswered)


def any_replica(
    candidates: Sequence[Candidate], *, forks: float, rng: random.Random
) -> list[Candidate]:
    return rng.sample(candidates, len(candidates))


def _unanswered(candidate: Candidate) -> int:
    return candidate.unanswered


RANKINGS: Mapping[str, Callable[[], Ranking]] = {  # for one router each
    "kvroute": lambda: rank,
    "round-robin": RoundRobin,
    "power-of-two": lambda: power_of_two,
    "least-loaded": lambda: least_loaded,
    "random": lambda: any_replica,
}
