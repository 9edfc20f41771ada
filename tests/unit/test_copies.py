"""Copies over one link run one at a time."""

import math

from hypothesis import given
from hypothesis import strategies as st

from kvroute.replica.modelled.modelled_copies import Copies


def test_a_copy_begins_when_the_one_before_has_ended() -> None:
    copies = Copies[str]()
    assert copies.begin("a", 2.0, now_s=10.0) == 12.0
    assert copies.begin("b", 1.0, now_s=11.0) == 13.0
    assert copies.next_end_s == 12.0
    assert [copies.pop(), copies.pop()] == ["a", "b"]
    assert copies.begin("c", 1.0, now_s=20.0) == 21.0


def test_a_copy_without_a_waiter_still_takes_its_time() -> None:
    copies, given_up = Copies[list[int]](), [1]
    copies.begin(given_up, 5.0, now_s=0.0)
    copies.drop(given_up)
    assert copies.next_end_s == math.inf
    assert copies.begin([2], 1.0, now_s=0.0) == 6.0


@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0, 10)), min_size=1))
def test_the_link_never_exceeds_its_speed(asked: list[tuple[float, float]]) -> None:
    copies, now_s, end_s = Copies[int](), 0.0, 0.0
    for number, (later_s, copy_s) in enumerate(asked):
        now_s += later_s
        end_s = max(end_s, now_s) + copy_s
        assert copies.begin(number, copy_s, now_s) == end_s
    assert [*copies] == list(range(len(asked)))
