"""The speed of copies from host memory."""

import pytest

from kvroute.replica.engine.copy_speed import FADE_S, CopySpeed


def test_the_claimed_speed_counts_until_something_is_copied() -> None:
    assert CopySpeed(1e9).bytes_per_s(100.0) == pytest.approx(1e9)


@pytest.mark.parametrize("real", [1e7, 1e8, 1e10])
def test_copies_show_the_real_speed(real: float) -> None:
    speed = CopySpeed(1e9)
    for second in range(50):
        speed.record(10**7, 10**7 / real, float(second))
    assert speed.bytes_per_s(49.0) == pytest.approx(real, rel=0.01)


def test_an_empty_copy_changes_nothing() -> None:
    speed = CopySpeed(1e9)
    speed.record(0, 0.0, 0.0)
    speed.record(10, 0.0, 0.0)
    assert speed.bytes_per_s(0.0) == pytest.approx(1e9)


def test_learned_slowness_decays_and_learned_fastness_does_not() -> None:
    slow, fast = CopySpeed(1e9), CopySpeed(1e9)
    for _ in range(50):
        slow.record(10**7, 1.0, 0.0)
        fast.record(10**9, 0.1, 0.0)
    assert slow.bytes_per_s(20 * FADE_S) == pytest.approx(1e9, rel=0.01)
    assert fast.bytes_per_s(20 * FADE_S) == pytest.approx(1e10, rel=0.01)


def test_decayed_slowness_does_not_return_with_a_fast_copy() -> None:
    speed = CopySpeed(1e9)
    for _ in range(20):
        speed.record(10**6, 60.0, 0.0)
    speed.record(10**6, 1e-3, 24 * FADE_S)
    assert speed.bytes_per_s(24 * FADE_S) == pytest.approx(1e9, rel=0.01)
