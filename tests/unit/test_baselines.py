"""The orders to compare with: each does what its name says, and forgets no replica."""

import random
from typing import get_args

import pytest

from kvroute.router.placement.baselines import RANKINGS
from kvroute.router.placement.policy import Candidate
from kvroute.settings.serve import ServeSettings

RNG = random.Random(3)
FLEET = [Candidate(name, 0, 0.0, 0.1, unanswered=i) for i, name in enumerate("abcd")]


def firsts(policy: str, times: int) -> list[str]:
    """Whom one router would send that many requests to."""
    ranking = RANKINGS[policy]()
    return [ranking(FLEET, rng=RNG, busy_s=1.0)[0].replica_id for _ in range(times)]


def test_every_policy_that_can_be_asked_for_is_there() -> None:
    assert get_args(ServeSettings.model_fields["policy"].annotation) == tuple(RANKINGS)


@pytest.mark.parametrize("policy", RANKINGS)
def test_every_replica_stands_in_the_order_once(policy: str) -> None:
    order = RANKINGS[policy]()(FLEET, rng=RNG, busy_s=1.0)
    assert sorted(candidate.replica_id for candidate in order) == list("abcd")
    assert RANKINGS[policy]()([], rng=RNG, busy_s=1.0) == []


def test_round_robin_takes_turns() -> None:
    assert firsts("round-robin", 9) == list("abcdabcda")


def test_power_of_two_never_takes_the_busiest_and_takes_all_others() -> None:
    assert set(firsts("power-of-two", 100)) == set("abc")


def test_least_loaded_takes_the_idlest() -> None:
    assert set(firsts("least-loaded", 20)) == {"a"}


def test_random_takes_any() -> None:
    assert set(firsts("random", 100)) == set("abcd")
