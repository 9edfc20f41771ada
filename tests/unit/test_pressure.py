"""Cache pressure, estimated from a router's prompts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.router.placement.pressure import MAX_PRESSURE, Pressure


def after(computed: int, evicted: int, *, prompts: int = 1000) -> float:
    pressure = Pressure()
    for _ in range(prompts):
        pressure.record(computed_tokens=computed, evicted_tokens=evicted)
    return pressure.value


def test_the_pressure_is_zero_if_no_evicted_block_is_requested_again() -> None:
    assert after(1000, 0) == 0.0
    assert Pressure().value == 0.0


def test_the_pressure_is_the_number_of_tokens_that_a_computed_token_evicts() -> None:
    """A half of the evicted tokens is requested again and evicts a quarter, and so on."""
    assert after(1000, 500) == pytest.approx(1.0)


def test_it_is_bounded() -> None:
    assert after(1000, 999) == after(1000, 1000) == MAX_PRESSURE


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)), max_size=50))
def test_any_prompts_keep_the_pressure_within_its_bounds(prompts: list[tuple[int, int]]) -> None:
    pressure = Pressure()
    for computed, evicted in prompts:
        pressure.record(computed_tokens=computed, evicted_tokens=evicted)
        assert 0.0 <= pressure.value <= MAX_PRESSURE
