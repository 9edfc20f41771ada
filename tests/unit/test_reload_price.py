"""An engine reloads blocks from host memory only where that takes less time than computing them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.speed import PrefillModel
from kvroute.replica.engine.reload_price import ReloadPrice

TOKEN_BYTES = 100_000.0


def price_of(bytes_per_s: float = 1e10) -> ReloadPrice:
    """Computing takes a second for 1,000 tokens, as long as nothing is measured."""
    return ReloadPrice(PrefillModel(1_000.0, 10_000.0), bytes_per_s, TOKEN_BYTES)


def test_claims_decide_until_something_is_measured() -> None:
    assert price_of().is_cheaper(0, 1_000)
    assert not price_of(bytes_per_s=5e7).is_cheaper(0, 1_000)
    assert price_of().reload_s(1_000) == pytest.approx(0.01)
    assert price_of().compute_s(0, 1_000) == pytest.approx(1.05)


def test_late_tokens_cost_more_to_compute_and_not_to_reload() -> None:
    slow = price_of(bytes_per_s=7e7)
    assert not slow.is_cheaper(0, 1_000)
    assert slow.is_cheaper(10_000, 11_000)


def test_a_tier_that_was_slow_is_left_alone_for_a_while() -> None:
    price = price_of()
    price.copied(100_000_000, observed_s=60.0)
    refusals = next(number for number in range(10_000) if price.is_cheaper(0, 1_000))
    assert 10 < refusals < 1_000


def test_an_engine_that_computes_fast_reloads_less() -> None:
    price = price_of(bytes_per_s=2e8)
    assert price.is_cheaper(0, 1_000)
    for _ in range(10):
        price.computed(predicted_s=10.0, observed_s=0.1)
    assert not price.is_cheaper(0, 1_000)


@given(st.lists(st.tuples(st.integers(1, 10**10), st.floats(1e-6, 100.0)), max_size=30))
def test_a_measured_speed_lies_between_the_claim_and_what_was_measured(
    copies: list[tuple[int, float]],
) -> None:
    price = price_of()
    speeds = [1e10]
    for copied_bytes, observed_s in copies:
        price.copied(copied_bytes, observed_s)
        speeds.append(copied_bytes / observed_s)
    found = 1_000 * TOKEN_BYTES / price.reload_s(1_000)
    assert min(speeds) * 0.999 <= found <= max(speeds) * 1.001
