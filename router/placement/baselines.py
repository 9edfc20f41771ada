"""Baseline policies that ignore caches, for comparison with ours on a live cluster.

Each policy gets the same candidates as ours and ranks all of them: when the first replica refuses a
request, the next one gets it. The load of a replica is the
number of its unanswered requests, including those of other routers.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from kvroute.router.placement.policy import Candidate, rank


class Ranking(Protocol):
    """A policy: returns all candidates, best first.

    The parameters are explained in `kvroute.router.placement.policy`.
    """

    def __call__(
        self,
        candidates: Sequence[Candidate],
        *,
        rng: random.Random,
        busy_s: float,
        pressure: float = 0.0,
        forks: float = 1.0,
    ) -> list[Candidate]: ...


class RoundRobin:
    """Each replica in turn; every router has its own counter."""

    def __init__(self) -> None:
        self._turn = -1

    def __call__(
        self,
        candidates: Sequence[Candidate],
        *,
        rng: random.Random,
        busy_s: float,
        pressure: float = 0.0,
        forks: float = 1.0,
    ) -> list[Candidate]:
        self._turn += 1
        first = self._turn % max(1, len(candidates))
        in_order = sorted(candidates, key=lambda candidate: candidate.replica_id)
        return in_order[first:] + in_order[:first]


def power_of_two(
    candidates: Sequence[Candidate], *, rng: random.Random, **_prices: object
) -> list[Candidate]:
    """Prefer the less loaded of two random replicas, as Ray Serve's default router does."""
    shuffled = rng.sample(candidates, len(candidates))
    return sorted(shuffled[:2], key=_unanswered) + shuffled[2:]


def least_loaded(
    candidates: Sequence[Candidate], *, rng: random.Random, **_prices: object
) -> list[Candidate]:
    """Prefer the replica with the fewest unanswered requests; ties are broken at random."""
    return sorted(rng.sample(candidates, len(candidates)), key=_unanswered)


def any_replica(
    candidates: Sequence[Candidate], *, rng: random.Random, **_prices: object
) -> list[Candidate]:
    return rng.sample(candidates, len(candidates))


def _unanswered(candidate: Candidate) -> int:
    return candidate.unanswered


RANKINGS: Mapping[str, Callable[[], Ranking]] = {  # each call makes a policy for one router
    "kvroute": lambda: rank,
    "round-robin": RoundRobin,
    "power-of-two": lambda: power_of_two,
    "least-loaded": lambda: least_loaded,
    "random": lambda: any_replica,
}
