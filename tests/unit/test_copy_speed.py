"""The speed of copies from host memory."""

import pytest

from kvroute.replica.engine.copy_speed import FADE_S, CopySpeed


def test_a_claim_holds_until_something_is_copied() -> None:
    assert CopySpeed(1e9).bytes_per_s(100.0) == pytest.approx(1e9)


@pytest.mark.parametrize("real", [1e7, 1e8, 1e10])
def test_copies_show_the_real_speed(real: float) -> None:
    speed = CopySpeed(1e9)
    for second in range(50):
        speed.copied(10**7, 10**7 / real, float(second))
    assert speed.bytes_per_s(49.0) == pytest.approx(real, rel=0.01)


def test_an_empty_copy_changes_nothing() -> None:
    speed = CopySpeed(1e9)
    speed.copied(0, 0.0, 0.0)
    speed.copied(10, 0.0, 0.0)
    assert speed.bytes_per_s(0.0) == pytest.approx(1e9)


def test_slow_copies_are_forgotten_and_fast_ones_are_not() -> None:
    slow, fast = CopySpeed(1e9), CopySpeed(1e9)
    for _ in range(50):
        slow.copied(10**7, 1.0, 0.0)
        fast.copied(10**9, 0.1, 0.0)
    assert slow.bytes_per_s(20 * FADE_S) == pytest.approx(1e9, rel=0.01)
    assert fast.bytes_per_s(20 * FADE_S) == pytest.approx(1e10, rel=0.01)


def test_one_fast_copy_after_slow_ones_have_faded_does_not_bring_them_back() -> None:
    speed = CopySpeed(1e9)
    for _ in range(20):
        speed.copied(10**6, 60.0, 0.0)
    speed.copied(10**6, 1e-3, 24 * FADE_S)
    assert speed.bytes_per_s(24 * FADE_S) == pytest.approx(1e9, rel=0.01)
