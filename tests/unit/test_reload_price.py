"""An engine reloads blocks from host memory only if that is faster than computing them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.prefill.speed import PrefillModel
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.reload_price import ReloadPrice

TOKEN_BYTES = 100_000.0


def price_of(bytes_per_s: float = 1e10) -> ReloadPrice:
    """Return prices with a claim of 1,000 computed tokens per second."""
    return ReloadPrice(PrefillModel(1_000.0, 10_000.0), CopySpeed(bytes_per_s), TOKEN_BYTES)


def test_the_claimed_speeds_decide_until_something_is_measured() -> None:
    assert price_of().is_cheaper(0, 1_000, 0.0)
    assert not price_of(bytes_per_s=5e7).is_cheaper(0, 1_000, 0.0)
    assert price_of().reload_s(1_000, 0.0) == pytest.approx(0.01)
    assert price_of().compute_s(0, 1_000) == pytest.approx(1.05)


def test_later_tokens_take_longer_to_compute_but_not_to_reload() -> None:
    slow = price_of(bytes_per_s=7e7)
    assert not slow.is_cheaper(0, 1_000, 0.0)
    assert slow.is_cheaper(10_000, 11_000, 0.0)


def test_a_slow_tier_is_tried_again_after_some_minutes_however_often_it_is_compared() -> None:
    price = price_of()
    price.copies.record(100_000_000, seconds=60.0, now_s=0.0)
    assert not any(price.is_cheaper(0, 1_000, 60.0) for _ in range(10_000))
    assert price.is_cheaper(0, 1_000, 1_800.0)


def test_a_comparison_changes_nothing() -> None:
    price = price_of()
    price.copies.record(100_000_000, seconds=60.0, now_s=0.0)
    before_s = price.reload_s(1_000, 60.0)
    assert not price.is_cheaper(0, 1_000, 60.0)
    assert price.reload_s(1_000, 60.0) == before_s


def test_a_tiers_slowness_decays_with_the_time_since_its_last_copy() -> None:
    price = price_of()
    price.copies.record(100_000_000, seconds=1.0, now_s=50.0)
    extra_s = price.reload_s(1_000, 50.0) - 0.01
    assert price.reload_s(1_000, 350.0) - 0.01 == pytest.approx(extra_s / math.e)


def test_decayed_slowness_does_not_return_with_a_fast_copy() -> None:
    price = price_of()
    price.copies.record(100_000_000, seconds=60.0, now_s=0.0)
    price.copies.record(100_000_000, seconds=0.01, now_s=3_000.0)
    assert price.is_cheaper(0, 1_000, 3_000.0)


def test_a_tier_that_is_faster_than_claimed_stays_fast() -> None:
    price = price_of()
    price.copies.record(100_000_000, seconds=0.001, now_s=0.0)
    assert price.reload_s(1_000, 0.0) == price.reload_s(1_000, 10_000.0) < 0.01


def test_an_engine_that_computes_fast_reloads_less() -> None:
    price = price_of(bytes_per_s=2e8)
    assert price.is_cheaper(0, 1_000, 0.0)
    for _ in range(10):
        price.record_step(predicted_s=10.0, observed_s=0.1)
    assert not price.is_cheaper(0, 1_000, 0.0)


@given(st.lists(st.tuples(st.integers(1, 10**10), st.floats(1e-6, 100.0)), max_size=30))
def test_the_learned_speed_is_between_the_claimed_and_the_measured_speed(
    copies: list[tuple[int, float]],
) -> None:
    price = price_of()
    speeds = [1e10]
    for copied_bytes, observed_s in copies:
        price.copies.record(copied_bytes, observed_s, now_s=0.0)
        speeds.append(copied_bytes / observed_s)
    learned = 1_000 * TOKEN_BYTES / price.reload_s(1_000, 0.0)
    assert min(speeds) * 0.999 <= learned <= max(speeds) * 1.001
