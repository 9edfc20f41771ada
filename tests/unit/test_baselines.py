"""The baseline policies: each ranks as its name says, and leaves out no replica."""

import random
from typing import get_args

import pytest

from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.policy import NO_PRICES, Candidate
from kvroute.settings.serve import ServeSettings

RNG = random.Random(3)
FLEET = [Candidate(name, 0, 0.0, 0.1, unanswered=i) for i, name in enumerate("abcd")]


def firsts(policy: str, times: int) -> list[str]:
    """Return the replicas to which one router would send this many requests."""
    ranking = RANKINGS[policy]()
    return [ranking(FLEET, rng=RNG, prices=NO_PRICES)[0].replica_id for _ in range(times)]


def test_every_policy_that_an_operator_can_choose_exists() -> None:
    assert get_args(ServeSettings.model_fields["policy"].annotation) == tuple(RANKINGS)


@pytest.mark.parametrize("policy", RANKINGS)
def test_every_ranking_has_each_replica_once(policy: str) -> None:
    order = RANKINGS[policy]()(FLEET, rng=RNG, prices=NO_PRICES)
    assert sorted(candidate.replica_id for candidate in order) == list("abcd")
    assert RANKINGS[policy]()([], rng=RNG, prices=NO_PRICES) == []


def test_round_robin_chooses_one_replica_after_the_other() -> None:
    assert firsts("round-robin", 9) == list("abcdabcda")


def test_power_of_two_chooses_any_replica_but_the_busiest() -> None:
    assert set(firsts("power-of-two", 100)) == set("abc")


def test_least_loaded_chooses_the_replica_with_the_least_load() -> None:
    assert set(firsts("least-loaded", 20)) == {"a"}


def test_random_chooses_any_replica() -> None:
    assert set(firsts("random", 100)) == set("abcd")
