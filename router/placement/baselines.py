"""Baseline policies that ignore caches, for comparison with kvroute's policy on a live cluster.

Each policy gets the same candidates as kvroute's and ranks all of them: when the first replica
refuses a request, the next one gets it. The load of a replica is the number of its unanswered
requests, including those of other routers.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvroute.router.placement.policy import Candidate, Prices, rank


class Ranking(Protocol):
    """A routing policy: returns all candidates, the best one first.

    The parameters are explained in `kvroute.router.placement.policy`.
    """

    def __call__(
        self,
        candidates: Sequence[Candidate],
        *,
        rng: random.Random,
        prices: Prices,
    ) -> list[Candidate]: ...


class RoundRobin:
    """Chooses the replicas one after the other. Every router has a counter of its own."""

    def __init__(self) -> None:
        self._count = -1  # requests so far, minus one

    def __call__(
        self,
        candidates: Sequence[Candidate],
        *,
        rng: random.Random,
        prices: Prices,
    ) -> list[Candidate]:
        self._count += 1
        first = self._count % max(1, len(candidates))
        in_order = sorted(candidates, key=lambda candidate: candidate.replica_id)
        return in_order[first:] + in_order[:first]


def power_of_two(
    candidates: Sequence[Candidate], *, rng: random.Random, prices: Prices
) -> list[Candidate]:
    """Prefer the less loaded of two random replicas, as Ray Serve's default router does."""
    shuffled = rng.sample(candidates, len(candidates))
    return sorted(shuffled[:2], key=_unanswered) + shuffled[2:]


def least_loaded(
    candidates: Sequence[Candidate], *, rng: random.Random, prices: Prices
) -> list[Candidate]:
    """Prefer the replicas with the fewest unanswered requests; break ties at random."""
    return sorted(rng.sample(candidates, len(candidates)), key=_unanswered)


def any_replica(
    candidates: Sequence[Candidate], *, rng: random.Random, prices: Prices
) -> list[Candidate]:
    """Rank the replicas at random."""
    return rng.sample(candidates, len(candidates))


def _unanswered(candidate: Candidate) -> int:
    return candidate.unanswered


# Value of --policy -> a function that creates the policy for one router.
RANKINGS: Mapping[str, Callable[[], Ranking]] = {
    "kvroute": lambda: rank,
    "round-robin": RoundRobin,
    "power-of-two": lambda: power_of_two,
    "least-loaded": lambda: least_loaded,
    "random": lambda: any_replica,
}
