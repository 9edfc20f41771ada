"""The lines of a batch, divided among replicas."""

import random

from hypothesis import given
from hypothesis import strategies as st

from kvroute.batch.parts import Parts


@given(st.integers(0, 200), st.integers(1, 20), st.randoms(use_true_random=False), st.booleans())
def test_each_line_is_taken_once(
    count: int, parts: int, rng: random.Random, knows_shared: bool
) -> None:
    order = rng.sample(range(count), count)
    shared = [rng.randrange(5) for _ in order] if knows_shared else []
    divided = Parts(order, parts, shared)
    taken = []
    for _ in range(count):
        line = divided.next(rng.randrange(parts))
        assert line is not None
        taken.append(line)
    assert all(divided.next(part) is None for part in range(parts))
    assert sorted(taken) == [*range(count)]


def test_each_part_takes_neighbours() -> None:
    parts = Parts(range(100, 112), 3)
    taken = [[parts.next(part) for part in range(3)] for _ in range(4)]
    assert taken == [[100, 104, 108], [101, 105, 109], [102, 106, 110], [103, 107, 111]]


def test_a_part_that_is_used_up_takes_the_rear_half_of_the_largest() -> None:
    parts = Parts(range(20), 2)
    assert [parts.next(1) for _ in range(11)] == [*range(10, 20), 5]
    assert [parts.next(0) for _ in range(6)] == [0, 1, 2, 3, 4, 8]
    assert [parts.next(1) for _ in range(2)] == [6, 7]


def test_a_cut_is_where_neighbours_have_least_in_common() -> None:
    shared = [0, *[9] * 99]
    shared[53] = 1
    parts = Parts(range(100), 2, shared)
    assert (parts.next(0), parts.next(1)) == (0, 53)
