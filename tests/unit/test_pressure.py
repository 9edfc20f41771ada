"""How tight the caches are, as a router's prompts show it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.placement.pressure import MAX_PRESSURE, Pressure


def after(computed: int, evicted: int, *, prompts: int = 1000) -> float:
    pressure = Pressure()
    for _ in range(prompts):
        pressure.record(computed_tokens=computed, evicted_tokens=evicted)
    return pressure.value


def test_where_nothing_that_was_evicted_is_asked_for_there_is_none() -> None:
    assert after(1000, 0) == 0.0
    assert Pressure().value == 0.0


def test_each_computed_token_costs_what_it_pushes_out() -> None:
    """A half of it comes back, and pushes out a quarter, and so on."""
    assert after(1000, 500) == pytest.approx(1.0)


def test_it_is_bounded() -> None:
    assert after(1000, 999) == after(1000, 1000) == MAX_PRESSURE


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50))
def test_no_prompts_lead_out_of_the_bounds(prompts: list[tuple[int, int]]) -> None:
    pressure = Pressure()
    for computed, evicted in prompts:
        pressure.record(computed_tokens=computed, evicted_tokens=evicted)
        assert 0.0 <= pressure.value <= MAX_PRESSURE
