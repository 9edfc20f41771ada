"""What a router derives about a replica from its requests: backlog, speed, decoding."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.prefill.speed import PrefillModel, PrefillSpeed
from kvroute.router.placement.load import (
    PendingRequest,
    ReplicaLoad,
    learned_slowness,
    new_replica_load,
    slow_replicas,
)

MODEL = PrefillModel(tokens_per_s=1000.0, attention_tokens=1000.0)
TOKENS = 1000  # tokens of each prompt


def sent(at_s: float, tokens: int = TOKENS, prefill_s: float = 1.0) -> PendingRequest:
    return PendingRequest(prefill_s=prefill_s, new_tokens=tokens, prompt_tokens=tokens, sent_s=at_s)


def test_a_token_costs_twice_as_much_where_attention_doubles_it() -> None:
    assert MODEL.seconds(0, 1) == pytest.approx(0.001, rel=1e-2)
    assert MODEL.seconds(1000, 1001) == pytest.approx(0.002, rel=1e-2)
    assert MODEL.seconds(0, 500) + MODEL.seconds(500, 2000) == pytest.approx(MODEL.seconds(0, 2000))


def test_the_backlog_is_the_pending_prefill_minus_the_time_of_the_running_prompt() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.send("b", sent(0.1))
    assert load.backlog_s(1.0, now_s=0.5) == pytest.approx(1.5)
    assert load.backlog_s(2.0, now_s=0.5) == pytest.approx(3.5)


def test_an_overdue_prompt_has_no_backlog_and_leaves_that_of_others() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.send("b", sent(0.0))
    assert load.backlog_s(1.0, now_s=9.0) == pytest.approx(1.0)


def test_a_first_token_turns_prefill_into_decode() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.first_token("a", 1.0)
    assert load.backlog_s(1.0, 1.0) == 0.0
    assert load.pending_tokens == 0
    assert load.decode_step_s > 0
    load.finish("a")
    assert load.decode_step_s == 0
    assert not load.is_busy


def test_the_real_speed_is_learned_from_first_tokens() -> None:
    load = ReplicaLoad(MODEL)
    for i in range(200):
        load.send(str(i), sent(float(3 * i)))
        load.first_token(str(i), 3 * i + 3.0)
        load.finish(str(i))
    assert load.speed.slowness == pytest.approx(3.0, rel=0.05)


def test_a_queued_request_is_timed_from_the_first_token_before_it() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.send("b", sent(0.0))
    load.first_token("a", 1.0)
    load.first_token("b", 2.0)
    assert load.speed.observed_s == pytest.approx(load.speed.predicted_s)
    assert load.speed.observed_s == pytest.approx(2.0, rel=0.05)


def test_first_tokens_of_one_step_lead_to_the_same_speed_in_any_order() -> None:
    def learned(*order: str) -> float:
        load = ReplicaLoad(MODEL)
        load.send("older", sent(0.0))
        load.send("younger", sent(1.5))
        for name in order:
            load.first_token(name, 2.0)
        return load.speed.slowness

    assert learned("older", "younger") == pytest.approx(learned("younger", "older"), rel=0.02)


def test_a_request_that_fails_before_its_first_token_does_not_change_the_learned_speed() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.finish("a")
    load.first_token("a", 99.0)
    assert load.speed.slowness == 1.0


def test_similar_speeds_are_smoothed_and_a_slow_replica_stays_slow() -> None:
    loads = [
        ReplicaLoad(MODEL, speed=PrefillSpeed(predicted_s=5.0, observed_s=seconds))
        for seconds in (5.0, 5.5, 5.2, 50.0)
    ]
    *near, (slow, healthy) = learned_slowness(loads)
    assert slow == 10.0
    assert all(1.0 < slowness == without_faults < 2.5 for slowness, without_faults in near)
    assert 1.0 < healthy < 2.5


def test_a_replica_that_is_much_slower_than_the_others_is_reported() -> None:
    loads = {
        name: ReplicaLoad(MODEL, speed=PrefillSpeed(predicted_s=5.0, observed_s=seconds))
        for name, seconds in {"a": 5.0, "b": 5.5, "c": 6.0, "slow": 11.0}.items()
    }
    assert slow_replicas(loads) == {"slow": pytest.approx(2.0)}
    del loads["slow"]
    assert slow_replicas(loads) == slow_replicas({}) == {}


def test_a_new_replica_starts_with_the_slowness_of_the_others() -> None:
    slow = ReplicaLoad(MODEL, speed=PrefillSpeed(predicted_s=5.0, observed_s=20.0))
    load = new_replica_load(MODEL, 8192, [slow])
    assert new_replica_load(MODEL, 8192, []).speed.slowness == 1.0
    assert load.speed.slowness == 4.0
    for i in range(100):
        load.send(str(i), sent(float(i)))
        load.first_token(str(i), i + 1.0)
    assert load.speed.slowness == pytest.approx(1.0, rel=0.1)


def test_unknown_requests_of_a_replica_count_like_the_mean_of_known_ones() -> None:
    load = ReplicaLoad(MODEL)
    for number in range(200):
        load.send(str(number), sent(0.0, prefill_s=0.5))
        load.finish(str(number))
    load.report(pending_tokens=0)
    load.report(pending_tokens=0)
    load.report(pending_tokens=4 * TOKENS)
    assert load.backlog_s(1.0, 0.0) == pytest.approx(4 * 0.5, rel=0.01)
    load.report(pending_tokens=0)
    assert load.backlog_s(1.0, 0.0) == 0.0


def test_the_speed_is_not_learned_while_unknown_requests_run() -> None:
    load = ReplicaLoad(MODEL)
    load.send("a", sent(0.0))
    load.report(pending_tokens=100 * TOKENS)
    load.first_token("a", 100.0)
    assert load.speed.slowness == 1.0
    load.report(pending_tokens=0)
    load.report(pending_tokens=0)
    load.send("b", sent(200.0))
    load.first_token("b", 300.0)
    assert load.speed.slowness > 1.0


def test_a_late_report_adds_no_unknown_requests() -> None:
    load = ReplicaLoad(MODEL)
    for name in "abc":
        load.send(name, sent(0.0))
    load.report(pending_tokens=3 * TOKENS)
    for name in "abc":
        load.finish(name)
    load.report(pending_tokens=3 * TOKENS)
    assert load.backlog_s(1.0, 0.0) == 0.0


@given(st.lists(st.tuples(st.sampled_from(["send", "first_token", "finish"]), st.integers(0, 5))))
def test_derived_sums_match_the_current_requests(steps: list[tuple[str, int]]) -> None:
    load = ReplicaLoad(MODEL)
    for at_s, (verb, number) in enumerate(steps):
        name = str(number)
        if verb == "send" and name not in load.waiting and name not in load.decoding:
            load.send(name, sent(float(at_s), tokens=number, prefill_s=number / 7))
        elif verb == "first_token":
            load.first_token(name, float(at_s))
        elif verb == "finish":
            load.finish(name)
    assert load.waiting_s == pytest.approx(sum(each.prefill_s for each in load.waiting.values()))
    assert load.pending_tokens == sum(each.new_tokens for each in load.waiting.values())
    assert load.decoding_tokens == sum(load.decoding.values())


def test_a_clock_without_progress_makes_no_replica_infinitely_fast() -> None:
    loads = [ReplicaLoad(MODEL, speed=PrefillSpeed(predicted_s=5.0)) for _ in range(3)]
    assert all(min(pair) > 0.0 for pair in learned_slowness(loads))
    assert slow_replicas({str(number): load for number, load in enumerate(loads)}) == {}
