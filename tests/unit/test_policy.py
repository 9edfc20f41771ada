"""Where requests are placed, as small scenes."""

import random
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.tiers import HOST, TierBlocks
from kvroute.router.placement.policy import Candidate, Price, Prices, Term, cost_s, prices, rank
from kvroute.router.placement.pressure import MAX_PRESSURE

RNG = random.Random(7)
UNIT_S = 2.0  # the fleet's unit of time


def replica(name: str, **facts: Any) -> Candidate:
    plain = Candidate(name, hit_blocks=0, backlog_s=0.0, own_s=0.1)
    return plain._replace(**facts)


def best(*candidates: Candidate, pressure: float = 0.0, forks: float = 1.0) -> str:
    common = prices(candidates, busy_s=UNIT_S, pressure=pressure, forks=forks)
    ranked = rank(candidates, rng=RNG, prices=common)
    return ranked[0].replica_id


def test_in_an_idle_fleet_the_replica_with_the_prefix_wins() -> None:
    assert best(replica("cold", copy_s=1.0), replica("warm", hit_blocks=30)) == "warm"


def test_an_idle_replica_beats_a_busy_one_with_a_short_prefix() -> None:
    busy = replica("busy", hit_blocks=2, backlog_s=3.0)
    assert best(busy, replica("idle", copy_s=0.2)) == "idle"


def test_a_long_prefix_is_worth_a_short_wait() -> None:
    warm = replica("warm", hit_blocks=200, backlog_s=0.5)
    assert best(warm, replica("idle", copy_s=2.0)) == "warm"


def test_recomputing_a_prefix_costs_more_in_a_busier_fleet() -> None:
    warm = replica("warm", hit_blocks=100, backlog_s=4.0)
    cold = replica("cold", copy_s=1.0, backlog_s=0.6)
    assert best(warm, cold, replica("idle", copy_s=1.0, backlog_s=0.0)) == "idle"
    assert best(warm, cold, replica("other", copy_s=1.0, backlog_s=0.7)) == "warm"


def test_at_equal_cost_an_unknown_prompt_goes_to_the_replica_with_most_free_blocks() -> None:
    assert best(replica("full", free_blocks=10), replica("roomy", free_blocks=900)) == "roomy"


def test_equal_replicas_are_chosen_by_chance_not_by_position() -> None:
    chosen = {best(replica("a"), replica("b"), replica("c")) for _ in range(60)}
    assert chosen == {"a", "b", "c"}


def test_new_conversations_rotate_over_idle_replicas() -> None:
    assert best(replica("a", branch_share=2.0), replica("b", branch_share=0.0)) == "b"


def test_a_conversation_stays_on_its_replica_in_spite_of_rotation() -> None:
    owner = replica("owner", hit_blocks=16, branch_share=2.0)
    other = replica("other", copy_s=0.01, branch_share=0.0)
    assert best(owner, other, forks=0.0) == "owner"
    assert best(owner, other) == "other"


def test_a_system_prompt_is_copied_in_an_idle_fleet_once_many_conversations_have_it() -> None:
    full = replica("full", hit_blocks=16, branch_share=2.0)
    empty = replica("empty", copy_s=0.5, branch_share=0.0)
    assert best(full, empty, forks=0.5) == "full"
    assert best(full, empty, forks=4.0) == "empty"
    assert best(full, empty, forks=4.0, pressure=1.0) == "full", "caches are tight"
    busy = full._replace(backlog_s=0.1)
    assert best(busy, empty._replace(backlog_s=0.1), forks=4.0) == "full"


def test_a_replica_whose_memory_is_full_is_avoided() -> None:
    assert best(replica("full", memory_s=2.0), replica("roomy", copy_s=0.5)) == "roomy"


def test_a_crowded_decode_batch_is_avoided() -> None:
    crowded = replica("crowded", decode_step_s=0.02)
    assert best(crowded, replica("calm", decode_step_s=0.001)) == "calm"


def test_a_reload_delays_only_its_own_request() -> None:
    """However high the price of congestion is, a reload costs only its own time."""
    busy = [replica(name, backlog_s=2.0) for name in "abc"]
    reloads = replica(
        "reloads", hit_blocks=50, reloads=(TierBlocks(HOST, 50),), backlog_s=2.0, reload_s=0.3
    )
    common = prices([*busy, reloads], busy_s=UNIT_S)
    assert common.alpha > 10
    assert cost_s(reloads, common) - cost_s(busy[0], common) == pytest.approx(0.3)


def test_a_prompt_avoids_the_fuller_cache_if_evicted_blocks_are_needed_again() -> None:
    fuller = replica("fuller", held_share=0.9, own_s=1.0)
    emptier = replica("emptier", held_share=0.3, own_s=1.0, backlog_s=0.1)
    assert best(fuller, emptier, pressure=0.0) == "fuller"
    assert best(fuller, emptier, pressure=1.0) == "emptier"
    warm = replica("warm", hit_blocks=200, held_share=0.9, own_s=0.1)
    assert best(warm, replica("cold", own_s=0.1, copy_s=2.0), pressure=1.0) == "warm"


def test_ranking_no_replicas_is_not_an_error() -> None:
    assert rank([], rng=RNG, prices=prices([], busy_s=UNIT_S)) == []


seconds = st.floats(0, 100, allow_subnormal=False)
terms = st.builds(
    Term,
    name=st.just("wait"),
    seconds=seconds,
    price=st.sampled_from(get_args(Price)),
    others_s=seconds,
    evicted_s=seconds,
    data=st.none(),
)
candidates = st.lists(
    st.builds(
        Candidate,
        replica_id=st.uuids().map(str),
        hit_blocks=st.integers(0, 100),
        backlog_s=seconds,
        own_s=seconds,
        copy_s=seconds,
        steps=st.floats(0, 1000),
        branch_share=st.floats(0, 64),
        decode_step_s=st.floats(0, 1),
        free_blocks=st.integers(0, 100_000),
        memory_s=seconds,
        setup_s=seconds,
        reload_s=seconds,
        worth=st.floats(0.01, 100),
        held_share=st.floats(0, 2),
        terms=st.lists(terms, max_size=2).map(tuple),
    ),
    max_size=20,
)


@given(candidates.filter(len))
def test_every_replica_is_ranked_once_and_costs_never_fall(fleet: list[Candidate]) -> None:
    common = prices(fleet, busy_s=UNIT_S)
    ranking = rank(fleet, rng=RNG, prices=common)
    assert sorted(c.replica_id for c in ranking) == sorted(c.replica_id for c in fleet)
    costs = [cost_s(candidate, common) for candidate in ranking]
    assert costs == sorted(costs)


@pytest.mark.parametrize(("backlog_s", "choice"), [(1.0, "warm"), (1.1, "idle")])
def test_a_wait_for_cached_blocks_is_worth_more_than_the_time_that_it_saves(
    backlog_s: float, choice: str
) -> None:
    warm, idle = replica("warm", hit_blocks=30, backlog_s=backlog_s), replica("idle", copy_s=0.3)
    assert best(warm, idle) == choice


@given(candidates.filter(len), st.floats(0, MAX_PRESSURE), st.floats(0.01, 100))
def test_the_order_does_not_depend_on_the_unit_of_time(
    fleet: list[Candidate], pressure: float, times: float
) -> None:
    def costs(factor: float) -> list[float]:
        slower = [scaled(each, factor) for each in fleet]
        common = prices(slower, busy_s=factor * UNIT_S, pressure=pressure)
        return [cost_s(each, common) for each in slower]

    assert costs(times) == pytest.approx([times * cost for cost in costs(1.0)])


def scaled(candidate: Candidate, factor: float) -> Candidate:
    """Return the candidate with all times multiplied by `factor`."""
    terms = [
        term._replace(**_scaled(term._asdict(), factor) | {"seconds": factor * term.seconds})
        for term in candidate.terms
    ]
    return candidate._replace(**_scaled(candidate._asdict(), factor) | {"terms": tuple(terms)})


def _scaled(values: dict[str, Any], factor: float) -> dict[str, Any]:
    return {name: v * factor if name.endswith("_s") else v for name, v in values.items()}


@given(candidates.filter(len), seconds)
def test_a_longer_backlog_never_attracts_a_request_that_adds_nothing_to_it(
    fleet: list[Candidate], more_s: float
) -> None:
    common = prices(fleet, busy_s=UNIT_S)
    here = fleet[0]._replace(own_s=0.0, copy_s=0.0, setup_s=0.0)
    busier = here._replace(backlog_s=here.backlog_s + more_s)
    assert cost_s(busier, common) >= cost_s(here, common)


def test_in_a_busy_fleet_a_slow_replica_costs_no_more_than_its_time() -> None:
    """The price of congestion does not apply to the additional time that the fault causes."""
    healthy = replica("healthy", own_s=1.0, backlog_s=4.0)
    slow = replica("slow", own_s=2.0, backlog_s=2.0, worth=0.5)
    common = prices([healthy, slow], busy_s=UNIT_S)
    assert common.alpha > 10
    assert best(healthy, slow) == "slow"


def test_what_the_seconds_of_a_features_term_are_spent_on_decides_what_they_cost() -> None:
    common = Prices(alpha=11.0, rotation=0.0, copy_uses=2.0, pressure=3.0 / 11.0)
    plain, slow = replica("plain"), replica("slow", worth=0.5)

    def added_s(candidate: Candidate, *terms: Term) -> float:
        return cost_s(candidate._replace(terms=terms), common) - cost_s(candidate, common)

    wait, gpu = Term("t", 2.0, "wait"), Term("t", 2.0, "gpu")
    network = Term("t", 2.0, "network", others_s=1.0, evicted_s=4.0)
    assert added_s(plain, wait) == 2.0
    assert added_s(plain, gpu) == 22.0
    assert added_s(slow, gpu) == 12.0, "the time of a slow replica is worth less to others"
    assert added_s(plain, network) == (11.0 * 3.0 + 3.0 * 4.0) / 2.0
    assert added_s(plain, wait, gpu, network) == 2.0 + 22.0 + 22.5
    candidate = plain._replace(terms=(wait, gpu, network), setup_s=1.0)
    assert (candidate.terms_wait_s, candidate.stopped_s) == (4.0, 3.0)
    assert candidate.ttft_s - plain.ttft_s == pytest.approx(7.0)
