"""Long prompts go where few answers run, if the time between tokens counts."""

import random
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.gaps.placed_gaps import PlacedGaps
from kvroute.router.placement.policy import NO_PRICES, Candidate, PromptFacts, rank, terms_s

PROMPT = cast("PromptFacts", None)  # it is not used


def weighed(*unanswered: int, own_s: float = 1.0) -> list[Candidate]:
    candidates = [
        Candidate(str(number), 0, 0.0, own_s, unanswered=count)
        for number, count in enumerate(unanswered)
    ]
    return [*PlacedGaps().weigh(PROMPT, candidates, 0.0)]


def test_a_prompt_goes_where_it_delays_the_fewest() -> None:
    ranking = rank(weighed(5, 0, 2), rng=random.Random(0), prices=NO_PRICES)
    assert [candidate.replica_id for candidate in ranking] == ["1", "2", "0"]


def test_the_delay_of_others_counts_and_does_not_delay_the_prompt_itself() -> None:
    first, second = weighed(3, 1)
    assert terms_s(first, NO_PRICES)["gaps"] == 3 * terms_s(second, NO_PRICES)["gaps"] > 0.0
    assert first.ttft_s == second.ttft_s == 1.0
    assert not first.loads_first  # so routers still learn the replica's speed from the prompt


def test_an_idle_fleet_has_no_term() -> None:
    assert all(not candidate.terms for candidate in weighed(0, 0))


@given(st.lists(st.integers(0, 1000), min_size=2, max_size=20), st.floats(0.0, 100.0))
def test_the_mean_cost_does_not_depend_on_the_load(unanswered: list[int], own_s: float) -> None:
    """So a busier fleet weighs other terms as before, and cached prompts cost nothing."""
    costs = [
        terms_s(each, NO_PRICES).get("gaps", 0.0) for each in weighed(*unanswered, own_s=own_s)
    ]
    expected = 0.5 * own_s if any(unanswered) else 0.0
    assert abs(sum(costs) / len(costs) - expected) < 1e-6
