"""How many lines of a batch the cluster accepts, as its refusals show."""

import heapq
import math

import pytest

from kvroute.batch.places import Places


def refuse(places: Places, open_lines: int, now_s: float = 0.0, again_s: float = 1.0) -> None:
    places.refused(now_s, open_lines=open_lines, again_s=again_s)


def try_more(places: Places, now_s: float, enough: int = 100) -> float:
    places.try_more(now_s, enough=enough)
    return places.count


def test_as_many_lines_are_open_as_the_cluster_has_accepted() -> None:
    places = Places()
    for others in range(15, 1, -1):
        refuse(places, others)
    assert places.count == 2


def test_more_lines_are_tried_after_the_time_that_the_refusal_named() -> None:
    places = Places()
    refuse(places, 2, again_s=3.0)
    assert places.wait_s(1.0) == 2.0
    assert [try_more(places, now_s) for now_s in (2.9, 3.0, 5.9, 6.0, 9.0)] == [2, 3, 3, 5, 9]
    refuse(places, 5, 10.0)
    assert [try_more(places, now_s) for now_s in (10.9, 11.0)] == [5, 6]


def accepting_two() -> Places:
    places = Places()
    refuse(places, 2)
    try_more(places, 1.0)
    refuse(places, 2, 1.0)
    return places


def test_a_place_is_used_again_if_the_cluster_learns_late_that_it_is_free() -> None:
    places = accepting_two()
    for now_s in (1.5, 1.8):
        refuse(places, 1, now_s)
        assert [try_more(places, now_s + after_s) for after_s in (0.0, 0.1)] == [1, 2]
        places.answered(1)


def test_a_place_that_another_request_has_taken_is_tried_again_after_the_whole_time() -> None:
    places = accepting_two()
    refuse(places, 1, 1.5)
    try_more(places, 1.6)
    refuse(places, 1, 1.6)
    assert [try_more(places, now_s) for now_s in (2.5, 2.6)] == [1, 2]


def test_a_place_is_tried_again_when_a_line_is_answered() -> None:
    places = accepting_two()
    refuse(places, 1, 1.5)
    places.answered(0)
    assert places.count == 2


def test_without_refusals_the_batch_may_open_as_many_lines_as_it_needs_again() -> None:
    places = Places()
    refuse(places, 0)
    assert [try_more(places, now_s, enough=4) for now_s in (1.0, 2.0, 3.0)] == [1, 3, math.inf]
    assert places.wait_s(4.0) is None


@pytest.mark.parametrize("limit", [1, 2, 10])
@pytest.mark.parametrize("late_s", [0.0, 0.005])
@pytest.mark.parametrize("answer_s", [0.3, 20.0])
def test_a_batch_runs_as_many_lines_as_its_tenant_may(
    limit: int, late_s: float, answer_s: float
) -> None:
    """Also if the cluster learns later than the batch that a line has ended."""
    needed_s, refusals = time_of(200, limit=limit, answer_s=answer_s, late_s=late_s)
    assert needed_s < 1.4 * 200 * answer_s / limit
    assert refusals < needed_s + 3 * 200


def time_of(lines: int, *, limit: int, answer_s: float, late_s: float) -> tuple[float, int]:
    """Run a batch in a modelled cluster; return the seconds that it took, and the refusals."""
    places, now_s, refusals, left, open_lines, counted = Places(), 0.0, 0, lines, 0, 0
    events = list[tuple[float, str]]()
    while left or open_lines:
        places.try_more(now_s, enough=16)
        for _ in range(int(min(16, places.count, left + open_lines)) - open_lines):
            if counted == limit:
                places.refused(now_s, open_lines=open_lines, again_s=1.0)
                refusals += 1
                break
            left, open_lines, counted = left - 1, open_lines + 1, counted + 1
            took_s = answer_s * (0.9 + 0.2 * (left * 0.618 % 1))
            heapq.heappush(events, (now_s + took_s, "answered"))
            heapq.heappush(events, (now_s + took_s + late_s, "left"))
        wait_s = places.wait_s(now_s)
        if events and (wait_s is None or events[0][0] <= now_s + wait_s):
            now_s, event = heapq.heappop(events)
            open_lines -= event == "answered"
            counted -= event == "left"
            if event == "answered":
                places.answered(open_lines)
        else:
            assert wait_s is not None
            now_s += wait_s
    return now_s, refusals
