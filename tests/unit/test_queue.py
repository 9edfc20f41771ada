"""The order of a router's queue, and when requests are sent."""

import random
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.messages import MAX_POSITIONS, RouterMessage, Waiting, decode, encode
from kvroute.contract.priority import BATCH_S
from kvroute.contract.records import VERSION
from kvroute.prefill.speed import PrefillModel
from kvroute.router.placement.load import ReplicaLoad
from kvroute.router.placement.loads import LaneRoom, ReplicaCapacity
from kvroute.router.queueing.forecast import (
    DELAYS,
    LATE,
    MAX_CORRECTION,
    MAX_MARGIN,
    MIN_CORRECTION,
    NEAR,
    RECENT,
    ArrivalRates,
    Correction,
    Margin,
    waiting_s,
)
from kvroute.router.queueing.queue import (
    BUSY_BACKLOG,
    DELAY,
    DIVIDE_S,
    IDLE_BACKLOG,
    LOOKED_AT,
    PATIENCE_S,
    STALE_S,
    Queue,
    QueuedRequest,
)
from kvroute.router.queueing.shares import MAX_TENANTS, SCARCE_S, SHARE_S, Shares
from tests.support.placements import anywhere

UNIT_S = 2.0  # the fleet's unit of time
BUSY_S, IDLE_BACKLOG_S = BUSY_BACKLOG * UNIT_S, IDLE_BACKLOG * UNIT_S
IDLE, BUSY = ReplicaCapacity("idle", 0.0), ReplicaCapacity("busy", BUSY_S)


def unit_s() -> float:
    return UNIT_S


Requests = partial(Queue[str], unit_s)


def held(
    name: str, at_s: float = 0.0, prefill_s: float = 0.1, **more: object
) -> QueuedRequest[str]:
    return QueuedRequest(name, at_s, prefill_s, place=anywhere, **more)  # type: ignore[arg-type]


def queue_of(*requests: QueuedRequest[str]) -> Queue[str]:
    queue = Requests()
    for request in requests:
        queue.add(request)
    return queue


def sent(queue: Queue[str], *replicas: ReplicaCapacity, now_s: float = 0.0) -> list[str]:
    """Return the requests that are sent now if the replicas' loads do not change."""
    names = []
    while due := queue.pop_next(replicas, now_s):
        names.append(due.request)
    return names


def test_requests_wait_while_every_replica_is_busy() -> None:
    queue = queue_of(held("a"))
    assert sent(queue, BUSY, BUSY) == []
    assert sent(queue) == []
    assert sent(queue, BUSY, ReplicaCapacity("free", BUSY_S - 0.01)) == ["a"]
    assert len(queue) == 0


def test_a_new_request_does_not_wait_if_a_replica_is_free_and_the_queue_is_empty() -> None:
    queue = Requests()
    assert queue.is_free(held("a"), 0.0)
    assert not queue.is_free(held("a"), BUSY_S)
    queue.add(held("a"))
    assert not queue.is_free(held("b"), 0.0)


times = st.floats(0.0, 300.0)
requests = st.builds(
    held,
    st.just("r"),
    times,
    st.floats(0.0, 20.0),
    priority_s=st.floats(-60.0, 60.0),
    is_batch=st.booleans(),
    tenant=st.sampled_from(["", "a", "b"]),
)


@given(st.lists(requests, max_size=40), st.randoms(use_true_random=False))
def test_every_request_leaves_the_queue_once(
    given: list[QueuedRequest[str]], rng: random.Random
) -> None:
    queue = queue_of(*given)
    gone = [each for each in given if rng.random() < 0.3]
    assert all(queue.remove(each) for each in gone)
    assert not any(queue.remove(each) for each in gone)
    left = [each for each in given if each not in gone]
    assert len(queue) == len(left) == len([*queue])
    now_s, due = 0.0, []
    while len(queue):
        now_s += 10.0
        replicas = [rng.choice((IDLE, BUSY)) for _ in range(3)]
        while one := queue.pop_next(replicas, now_s):
            queue.sent(one, now_s)
            due.append(one)
    assert sorted(map(id, due)) == sorted(map(id, left))


@given(st.lists(requests.filter(lambda each: not each.is_batch), max_size=40))
def test_requests_leave_in_the_order_of_their_order_times(given: list[QueuedRequest[str]]) -> None:
    queue = queue_of(*given)
    turns_s = []
    while due := queue.pop_next([IDLE], 0.0):
        turns_s.append(due.order_s)
    assert turns_s == sorted(turns_s)


def test_short_prompts_pass_long_ones_but_not_for_ever() -> None:
    queue = queue_of(held("long", 0.0, 100.0), held("short", 1.0, 0.01))
    assert sent(queue, IDLE) == ["short", "long"]
    queue = queue_of(held("long", 0.0, 100.0), held("late", DELAY * 100.0 + 0.1, 0.0))
    assert sent(queue, IDLE) == ["long", "late"]


def test_a_priority_moves_the_order_time() -> None:
    queue = queue_of(held("default"), held("sooner", 20.0, priority_s=-30.0))
    assert sent(queue, IDLE) == ["sooner", "default"]


# Background requests.


def with_room(replica_id: str, backlog_s: float = 0.0) -> ReplicaCapacity:
    """Return a replica that has room for batch requests."""
    lane = ReplicaLoad(PrefillModel(1000.0, 1e6))
    return ReplicaCapacity(replica_id, backlog_s, lane=LaneRoom(lane, 1e6, 1e6, 1e6))


def test_a_batch_request_goes_to_a_replica_with_room_whatever_else_waits() -> None:
    queue = queue_of(held("batch", is_batch=True), held("other", 50.0))
    assert sent(queue, BUSY) == []
    batch = queue.pop_next([BUSY, with_room("b", BUSY_S)], 0.0)
    assert batch
    assert (batch.request, batch.allowed_ids) == ("batch", ["b"])
    assert sent(queue, BUSY) == []


def test_other_requests_are_sent_before_batch_requests() -> None:
    queue = queue_of(held("batch", is_batch=True), held("other", 50.0))
    assert sent(queue, with_room("a")) == ["other", "batch"]


def test_a_tenant_above_its_share_waits_while_another_router_has_requests() -> None:
    queue = shared()
    queue.add(held("g", tenant="greedy"))
    queue.receive("other", told(held("a")), 0.0)
    assert sent(queue, IDLE) == []
    queue.forget("other")
    assert sent(queue, IDLE) == ["g"]


def test_batch_requests_keep_the_order_of_their_sender() -> None:
    """Short prompts do not pass long ones: neighbours share their beginnings."""
    batch = [held("long", 0.0, 9.0, is_batch=True), held("short", 1.0, 0.1, is_batch=True)]
    assert sent(queue_of(*batch), with_room("a")) == ["long", "short"]


def test_a_batch_request_is_promoted_after_a_time() -> None:
    queue = queue_of(held("batch", is_batch=True), held("other", BATCH_S))
    soon = ReplicaCapacity("a", BUSY_S - 0.1)
    assert sent(queue, soon, now_s=BATCH_S) == ["other"]
    queue.add(held("before", BATCH_S - 10.0))
    queue.add(held("after", BATCH_S + 10.0))
    assert sent(queue, soon, now_s=BATCH_S + 11.0) == ["before", "batch", "after"]


def shared(greedy_s: float = 9.0, modest_s: float = 1.0, others: str = "modest") -> Queue[str]:
    """Return a queue after two tenants have used the fleet, and one of `others` has waited."""
    queue = Requests()
    queue.sent(held("past", prefill_s=greedy_s, tenant="greedy"), 0.0)
    queue.sent(held("past", prefill_s=modest_s, tenant="modest"), 0.0)
    queue.add(held("w", tenant=others))
    assert sent(queue, BUSY) == []
    assert sent(queue, IDLE) == ["w"]
    return queue


def test_requests_of_a_tenant_above_its_share_wait_in_the_background() -> None:
    queue = shared()
    assert not queue.is_free(held("g", tenant="greedy"), 0.0)
    assert queue.is_free(held("m", tenant="modest"), 0.0)
    queue.add(held("g", tenant="greedy"))
    queue.add(held("m", 100.0, tenant="modest"))
    soon = ReplicaCapacity("a", IDLE_BACKLOG_S)
    assert sent(queue, soon) == ["m"]
    assert sent(queue, IDLE) == ["g"]


def test_waiting_requests_move_to_the_background_when_their_tenant_exceeds_its_share() -> None:
    queue = shared(0.1, 1.0)
    queue.add(held("g", tenant="greedy"))
    queue.sent(held("past", prefill_s=9.0, tenant="greedy"), DIVIDE_S)
    queue.add(held("m", 100.0, tenant="modest"))
    assert sent(queue, ReplicaCapacity("a", IDLE_BACKLOG_S), now_s=DIVIDE_S) == ["m"]


@pytest.mark.parametrize(
    ("after_s", "others"),
    [(10 * SHARE_S, "modest"), (SCARCE_S + 1.0, "modest"), (0.0, "greedy")],
    ids=["forgotten", "nobody else waits", "nobody else has waited"],
)
def test_shares_do_not_matter_when_no_other_tenant_waits(after_s: float, others: str) -> None:
    queue = shared(others=others)
    queue.add(held("g", tenant="greedy"))
    assert sent(queue, ReplicaCapacity("a", IDLE_BACKLOG_S), now_s=after_s) == ["g"]


def test_requests_without_a_tenant_have_no_share() -> None:
    queue = shared()
    queue.sent(held("past", prefill_s=1e6), 0.0)
    assert queue.is_free(held("next"), 0.0)


def test_a_user_with_many_names_does_not_reduce_the_share_of_others() -> None:
    queue = shared(3.0, 0.1)
    for number in range(1000):
        queue.sent(held("past", prefill_s=0.1, tenant=f"name {number}"), 0.0)
    assert queue.is_free(held("next", tenant="greedy"), 0.0)


def test_the_number_of_counted_tenants_is_bounded() -> None:
    shares = Shares()
    for number in range(2 * MAX_TENANTS):
        shares.use(f"t{number}", 1.0, 0.0)
    shares.note_waiting(["t0", "t1"], 0.0)
    shares.use("greedy", 1e6, 0.0)
    assert not shares.are_exceeded("greedy")
    shares.use("t0", 1e6, 0.0)
    assert shares.are_exceeded("t0")


def test_a_background_request_that_an_idle_replica_has_cached_goes_first() -> None:
    holders = ["busy"] * 5 + ["idle"] + ["busy"] * LOOKED_AT
    queue = shared(1e3)
    for number, holder_id in enumerate(holders):
        queue.add(held(str(number), number, tenant="greedy", holder_id=holder_id))
    assert sent(queue, IDLE)[:2] == ["5", "0"]


# Several routers.


def told(*requests: QueuedRequest[str]) -> Waiting:
    """Return the message of another router with these waiting requests."""
    waiting = queue_of(*requests).report(0.0)
    message = decode(encode(RouterMessage(VERSION, "other", [], waiting=waiting)))
    assert message.waiting
    return message.waiting


def test_with_one_free_replica_only_the_first_request_of_all_routers_is_sent() -> None:
    queue = queue_of(held("mine", 5.0), held("mine too", 6.0))
    queue.receive("other", told(held("theirs", 1.0)), 0.0)
    assert sent(queue, IDLE, BUSY) == []
    assert sent(queue, IDLE, IDLE) == ["mine", "mine too"]


LATER_S = PATIENCE_S + 0.01


def behind(*requests: QueuedRequest[str]) -> Queue[str]:
    """Return a queue with these requests; another router has requests that come before."""
    queue = queue_of(*requests)
    queue.receive("other", told(held("theirs", 1.0), held("theirs", 1.0)), 0.0)
    return queue


def test_a_router_does_not_wait_for_one_that_sends_nothing() -> None:
    queue = behind(held("mine", 5.0), held("mine too", 6.0))
    assert sent(queue, IDLE) == []
    assert sent(queue, IDLE, now_s=PATIENCE_S) == []
    assert sent(queue, IDLE, now_s=LATER_S) == ["mine", "mine too"]


def test_other_routers_get_time_to_send_each_time_a_replica_is_free_again() -> None:
    queue = behind(held("mine", 5.0), held("mine too", 6.0))
    assert sent(queue, IDLE) == []
    assert sent(queue, BUSY, now_s=PATIENCE_S) == []
    assert sent(queue, IDLE, now_s=LATER_S) == []
    assert queue.pop_next([IDLE], 2 * LATER_S)
    assert sent(queue, BUSY, now_s=2 * LATER_S) == []
    assert sent(queue, IDLE, now_s=3 * LATER_S) == []
    assert sent(queue, IDLE, now_s=4 * LATER_S) == ["mine too"]


def test_a_router_waits_for_one_that_sends_its_requests() -> None:
    queue = behind(held("mine", 5.0))
    for step in range(10):
        assert sent(queue, IDLE, now_s=step * PATIENCE_S) == []
        queue.taken(IDLE.replica_id)


def test_a_router_that_did_not_check_for_a_while_waits_for_others_again() -> None:
    queue = behind(held("mine", 5.0))
    assert sent(queue, IDLE) == []
    assert sent(queue, IDLE, now_s=1.1 * STALE_S) == []


@pytest.mark.parametrize("ends", ["forgotten", "empty"])
def test_a_router_without_waiting_requests_delays_nobody(ends: str) -> None:
    queue = queue_of(held("mine", 5.0))
    queue.receive("other", told(held("theirs", 1.0)), 0.0)
    if ends == "empty":
        queue.receive("other", Waiting(), 0.0)
    else:
        queue.forget("other")
    assert sent(queue, IDLE) == ["mine"]


@given(st.integers(1, 3000))
def test_a_published_queue_is_bounded_and_has_the_first_requests_and_the_sum(count: int) -> None:
    waiting = told(*(held(str(n), n, 0.5) for n in range(count)))
    assert len(waiting.places) <= MAX_POSITIONS
    assert waiting.places[:16] == [*range(1, 1 + min(16, count))]
    assert waiting.places[-1] == count
    assert waiting.work_s[-1] == pytest.approx(0.5 * count)


def test_the_queue_is_published_after_changes_and_again_after_a_while() -> None:
    queue = Requests()
    assert queue.report(0.0) == Waiting()
    assert queue.report(0.1) is None
    queue.add(held("a"))
    assert queue.report(0.1) is not None
    assert queue.report(0.2) is None
    assert queue.report(2.0) is not None
    assert sent(queue, IDLE, now_s=2.0) == ["a"]
    assert queue.report(2.1) == Waiting()
    assert queue.report(9.0) == Waiting(), "the last message may have been lost"


# Forecasts.

NOTHING = ArrivalRates(unit_s).sooner(0.0)


def test_a_wait_is_the_work_before_divided_by_the_replicas() -> None:
    assert waiting_s(8.0, 5.0, NOTHING, 4, UNIT_S) == 2.0
    assert waiting_s(0.0, 5.0, NOTHING, 4, UNIT_S) == 0.0
    assert waiting_s(8.0, 5.0, NOTHING, 0, UNIT_S) == float("inf")


@given(
    ahead_s=st.floats(0.0, 200.0),
    lead_s=st.floats(0.0, 150.0),
    replicas=st.integers(1, 16),
    arrivals=st.lists(st.tuples(st.floats(0.01, 5.0), st.floats(0.0, 150.0)), max_size=30),
)
def test_a_wait_is_that_of_a_fluid_that_drains(
    ahead_s: float, lead_s: float, replicas: int, arrivals: list[tuple[float, float]]
) -> None:
    rates = ArrivalRates(unit_s)
    for prefill_s, delayed_s in arrivals:
        rates.add(prefill_s, delayed_s, 0.0)
    sooner = rates.sooner(0.0)
    step_s, at_s, left_s = 0.01, 0.0, ahead_s
    while left_s > 0.0:
        left_s += step_s * (_comes(sooner, lead_s - at_s) - replicas)
        at_s += step_s
    assert waiting_s(ahead_s, lead_s, sooner, replicas, UNIT_S) == pytest.approx(
        at_s, abs=0.5, rel=0.02
    )


def _comes(sooner: list[float], delay_s: float) -> float:
    delay = delay_s / UNIT_S
    shorter = [rate for most, rate in zip(DELAYS, sooner, strict=True) if most <= delay]
    return max(shorter, default=0.0)


def test_rates_of_arrivals_decay() -> None:
    arrivals = ArrivalRates(unit_s)
    arrivals.add(10.0, 1.0, 0.0)
    assert arrivals.sooner(0.0)[-1] == pytest.approx(10.0 / (RECENT * UNIT_S))
    assert arrivals.sooner(100.0)[-1] < 1e-3


def test_a_request_is_forecast_to_wait_for_those_before_it_at_all_routers() -> None:
    queue = queue_of(held("a", prefill_s=1.0), held("long", prefill_s=30.0))
    queue.receive("other", told(held("b", prefill_s=2.0)), 0.0)
    new = held("new", 90.0, 0.0)
    assert queue.forecast_s(new, replicas=1, sooner=NOTHING, now_s=90.0) == pytest.approx(3.0)
    batch = held("new", 1300.0, 0.0, is_batch=True)
    assert queue.forecast_s(batch, replicas=1, sooner=NOTHING, now_s=1300.0) == pytest.approx(33.0)


@given(st.lists(st.tuples(st.floats(0, 1e3), st.floats(0, 1e3)), max_size=50))
def test_a_correction_is_bounded(waits: list[tuple[float, float]]) -> None:
    correction = Correction(UNIT_S)
    for forecast_s, waited_s in waits:
        correction.learn(forecast_s, waited_s)
        assert MIN_CORRECTION <= correction.factor <= MAX_CORRECTION


def test_forecasts_learn_from_their_errors() -> None:
    correction = Correction(UNIT_S)
    for _ in range(100):
        correction.learn(1.0, 2.0)
    assert correction.factor == pytest.approx(2.0, rel=0.05)


@pytest.mark.parametrize("spread", [0.1, 0.3])
def test_a_margin_lets_few_requests_wait_up_to_their_limit(spread: float) -> None:
    margin, rng = Margin(), random.Random(0)
    late = []
    for _ in range(20_000):
        share = rng.uniform(0.0, 1.0)
        if margin.factor * share < 1.0:
            is_late = share * rng.lognormvariate(0.0, spread) > 1.0
            margin.learn(share, is_late=is_late)
            late.append(is_late)
    assert sum(late[-10_000:]) < 1.5 * LATE * 10_000
    assert 1.0 < margin.factor < MAX_MARGIN


def test_a_margin_is_bounded_and_learns_only_near_limits() -> None:
    margin = Margin()
    for _ in range(1000):
        margin.learn(0.99 * NEAR, is_late=True)
    assert margin.factor == 1.0
    for _ in range(1000):
        margin.learn(1.0, is_late=True)
    assert margin.factor == MAX_MARGIN
    for _ in range(10_000):
        margin.learn(1.0, is_late=False)
    assert margin.factor == 1.0
