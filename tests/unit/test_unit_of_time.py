"""The fleet's unit of time is learned from thousands of requests, and shared among routers."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.messages import LearnedScale, decode, encode
from kvroute.router.connections.peers import ALIVE_S, PeerPublisher, PeerSubscriber
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.scale import MEMORY, Scale
from tests.support.records import record


def scale_of(*prefills_s: float, claimed_s: float = 1.0) -> Scale:
    scale = Scale(claimed_s)
    for prefill_s in prefills_s:
        scale.record_prefill(prefill_s)
    return scale


def test_for_prompts_of_equal_length_the_unit_is_half_of_their_time() -> None:
    assert scale_of(*[2.0] * 20 * MEMORY).busy_s == pytest.approx(1.0)


def test_a_few_long_prompts_make_the_unit_longer() -> None:
    assert scale_of(*[1.0] * 99, 100.0).busy_s > 3 * scale_of(*[1.0] * 100).busy_s


def test_the_unit_starts_with_the_reported_speed_and_changes_slowly() -> None:
    begin_s = Scale(1.0).busy_s
    assert scale_of(5.0).busy_s == pytest.approx(begin_s, rel=0.2)
    assert scale_of(*[0.01] * 5 * MEMORY).busy_s < begin_s / 2


@given(st.lists(st.floats(1e-3, 1e3), max_size=50), st.lists(st.floats(1e-3, 1e3), max_size=50))
def test_a_router_adopts_the_means_of_one_that_has_seen_more_requests(
    few: list[float], many: list[float]
) -> None:
    one, other = scale_of(*few), scale_of(*many)
    before = one.share()
    one.adopt(other.share())
    assert one.share() == (other.share() if len(many) > len(few) else before)


@pytest.mark.parametrize(
    "learned", [LearnedScale(0.0, 1.0, 500), LearnedScale(1.0, 1.0, 10**12)], ids=str
)
def test_invalid_means_are_not_adopted(learned: LearnedScale) -> None:
    scale = Scale(1.0)
    scale.adopt(learned)
    assert scale == Scale(1.0)


def test_a_new_router_learns_the_unit_from_the_first_heartbeat() -> None:
    now_s = 100.0
    old = scale_of(*[7.0] * 1000)
    publisher = PeerPublisher("old", scale=old.share, clock=lambda: now_s)
    fleet = Fleet(model="m", revision="", block_size=16, rng=random.Random(0))
    subscriber = PeerSubscriber(fleet, own="new", clock=lambda: now_s)
    fleet.update([record("a")])  # its speed is known, so that the scale is kept
    subscriber.receive(decode(encode(publisher.next_message())))
    assert fleet.loads.scale.busy_s == old.busy_s
    assert publisher.next_message().scale is None, (
        "it is sent with heartbeats, not with every event"
    )
    now_s += ALIVE_S
    assert publisher.next_message().scale is not None
