"""Where requests go, told as small scenes."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.routing.policy import Candidate, cost_s, prices, rank, terms_s
from kvroute.router.routing.pressure import MOST

RNG = random.Random(7)


def replica(name: str, **facts: float) -> Candidate:
    plain = Candidate(name, hit_blocks=0, backlog_s=0.0, own_s=0.1)
    return plain._replace(**facts)  # type: ignore[arg-type]


def best(*candidates: Candidate, forks: int = 0, pressure: float = 0.0) -> str:
    return rank(candidates, forks=forks, rng=RNG, pressure=pressure)[0].replica_id


def test_in_an_idle_fleet_the_replica_with_the_prefix_wins() -> None:
    assert best(replica("cold", copy_s=1.0), replica("warm", hit_blocks=30)) == "warm"


def test_an_idle_replica_beats_a_busy_one_with_a_short_prefix() -> None:
    busy = replica("busy", hit_blocks=2, backlog_s=3.0)
    assert best(busy, replica("idle", copy_s=0.2)) == "idle"


def test_a_long_prefix_is_worth_a_short_wait() -> None:
    warm = replica("warm", hit_blocks=200, backlog_s=0.5)
    assert best(warm, replica("idle", copy_s=2.0)) == "warm"


def test_the_busier_the_fleet_the_dearer_a_recomputed_prefix() -> None:
    warm = replica("warm", hit_blocks=100, backlog_s=2.0)
    cold = replica("cold", copy_s=1.0, backlog_s=0.6)
    assert best(warm, cold, replica("idle", copy_s=1.0, backlog_s=0.0)) == "idle"
    assert best(warm, cold, replica("other", copy_s=1.0, backlog_s=0.7)) == "warm"


def test_a_prompt_nobody_knows_goes_at_equal_cost_to_the_most_room() -> None:
    assert best(replica("full", free_blocks=10), replica("roomy", free_blocks=900)) == "roomy"


def test_equal_replicas_are_chosen_by_chance_not_by_position() -> None:
    chosen = {best(replica("a"), replica("b"), replica("c")) for _ in range(60)}
    assert chosen == {"a", "b", "c"}


def test_idle_replicas_take_turns_with_new_conversations() -> None:
    assert best(replica("a", branch_share=2.0), replica("b", branch_share=0.0)) == "b"


def test_a_prefix_that_many_leave_from_gets_a_second_copy_when_its_owner_has_had_its_turns() -> (
    None
):
    owner = replica("owner", hit_blocks=16, branch_share=2.0)
    other = replica("other", copy_s=1.0, branch_share=0.0)
    assert best(owner, other, forks=1) == "owner"
    assert best(owner, other, forks=4) == "other"


def test_a_chats_own_history_stays_where_it_is_whoever_had_more_turns() -> None:
    owner = replica("owner", hit_blocks=16, branch_share=2.0, recent_share=2.0)
    assert best(owner, replica("other", copy_s=0.3, branch_share=0.0, recent_share=0.0)) == "owner"


def test_a_crowded_decode_batch_is_avoided() -> None:
    crowded = replica("crowded", decode_step_s=0.02)
    assert best(crowded, replica("calm", decode_step_s=0.001)) == "calm"


def test_long_prompts_queue_behind_long_prompts_and_leave_the_emptiest_replica_to_short_ones() -> (
    None
):
    def names(own_s: float) -> str:
        backlogs_s = {"emptiest": 0.2, "third": 4.0, "second": 5.0, "first": 6.0}
        return best(*(replica(n, backlog_s=s, own_s=own_s) for n, s in backlogs_s.items()))

    assert names(0.05) == "emptiest"
    assert names(10.0) == "second"


def test_beside_a_short_wait_long_prompts_take_an_idle_replica() -> None:
    busy = [replica("a", backlog_s=1.9, own_s=10.0), replica("b", backlog_s=1.9, own_s=10.0)]
    assert best(*busy, replica("c", own_s=10.0), replica("d", own_s=10.0)) in "cd"


def test_a_reload_delays_its_own_request_and_nobody_else() -> None:
    """So however dear computing is, it costs what it takes."""
    busy = [replica(name, backlog_s=2.0) for name in "abc"]
    reloads = replica("reloads", hit_blocks=50, host_blocks=50, backlog_s=2.0, reload_s=0.3)
    common = prices([*busy, reloads], 0)
    assert common.alpha > 10
    assert cost_s(reloads, common) - cost_s(busy[0], common) == pytest.approx(0.3)


def test_nobody_to_rank_is_no_error() -> None:
    assert rank([], forks=0, rng=RNG) == []


seconds = st.floats(0, 100)
candidates = st.lists(
    st.builds(
        Candidate,
        replica_id=st.uuids().map(str),
        hit_blocks=st.integers(0, 100),
        backlog_s=seconds,
        own_s=seconds,
        copy_s=seconds,
        pending_tokens=st.integers(0, 100_000),
        new_tokens=st.integers(0, 100_000),
        recent_share=st.floats(0, 64),
        branch_share=st.floats(0, 64),
        decode_step_s=st.floats(0, 1),
        free_blocks=st.integers(0, 100_000),
        lora_s=seconds,
        reload_s=seconds,
    ),
    max_size=20,
)


@given(candidates, st.integers(0, 100))
def test_every_replica_is_ranked_once_and_costs_never_fall(
    fleet: list[Candidate], forks: int
) -> None:
    ranking = rank(fleet, forks=forks, rng=RNG)
    assert sorted(c.replica_id for c in ranking) == sorted(c.replica_id for c in fleet)
    costs = [cost_s(candidate, prices(fleet, forks)) for candidate in ranking]
    assert costs == sorted(costs)


def test_tight_caches_do_without_second_copies() -> None:
    owner = replica("owner", hit_blocks=16, branch_share=2.0)
    other = replica("other", copy_s=0.05, branch_share=0.0)
    assert best(owner, other, forks=4) == "other"
    assert best(owner, other, forks=4, pressure=1.0) == "owner"


def test_a_copy_that_pushes_out_what_is_asked_for_again_is_worth_a_longer_wait() -> None:
    warm, idle = replica("warm", hit_blocks=30, backlog_s=0.5), replica("idle", copy_s=0.3)
    assert best(warm, idle) == "idle"
    assert best(warm, idle, pressure=2.0) == "warm"


@given(candidates.filter(len), st.integers(0, 100), st.floats(0, MOST))
def test_the_terms_that_are_shown_add_up_to_the_cost_that_decides(
    fleet: list[Candidate], forks: int, pressure: float
) -> None:
    common = prices(fleet, forks, pressure)
    for candidate in fleet:
        assert sum(terms_s(candidate, common)) == pytest.approx(cost_s(candidate, common))


@given(candidates.filter(len), seconds)
def test_a_longer_backlog_never_attracts_a_request_that_adds_nothing_to_it(
    fleet: list[Candidate], more_s: float
) -> None:
    common = prices(fleet, 0)
    here = fleet[0]._replace(own_s=0.0, copy_s=0.0, lora_s=0.0)
    busier = here._replace(backlog_s=here.backlog_s + more_s)
    assert cost_s(busier, common) >= cost_s(here, common)
