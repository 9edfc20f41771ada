"""A router learns how fast engines compute prompts from the times of their first tokens."""

import random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from kvroute.prefill.prefill_queue import PrefillQueue
from kvroute.prefill.speed import MAX_OFF, PrefillSpeed
from kvroute.router.placement.load import PendingRequest

SHORT_S = 0.00012  # predicted for three tokens
FIXED_S = 0.03


def alone(speed: PrefillSpeed, predicted_s: float, observed_s: float) -> None:
    speed.first_token(predicted_s, observed_s, queued_s=predicted_s, is_alone=True)


@given(st.integers(0, 2**32), st.floats(0.001, 0.1), st.floats(0.2, 20.0), st.booleans())
def test_the_slowness_is_learned_beside_a_fixed_part(
    seed: int, step_s: float, slowness: float, short_first: bool
) -> None:
    rng, speed = random.Random(seed), PrefillSpeed()
    fixed_s = rng.uniform(1.0, 4.0) * step_s
    speed.step(step_s)
    if short_first:
        for _ in range(300):
            alone(speed, 0.1 * step_s / slowness, fixed_s)
    longest_s = 50 * fixed_s / slowness
    for _ in range(2000):
        predicted_s = longest_s * rng.random()
        alone(speed, predicted_s, (fixed_s + slowness * predicted_s) * rng.uniform(0.9, 1.1))
    assume(speed.predicted_s > 10.0)  # enough to outweigh the claim
    assert speed.slowness == pytest.approx(slowness, rel=0.3)


def test_short_prompts_teach_no_slowness() -> None:
    speed, rng = PrefillSpeed(step_s=FIXED_S / 3), random.Random(1)
    for _ in range(100_000):
        alone(speed, SHORT_S, FIXED_S * rng.uniform(0.5, 2.0))
    assert speed.slowness == pytest.approx(1.0, rel=0.2)


def test_short_prompts_in_one_step_do_not_change_the_learned_slowness() -> None:
    speed = PrefillSpeed(step_s=FIXED_S / 3)
    for _ in range(2000):
        for left in range(8, 0, -1):
            observed_s = FIXED_S if left == 8 else 0.0
            speed.first_token(SHORT_S, observed_s, queued_s=left * SHORT_S, is_alone=False)
    assert speed.slowness < 2.0


@given(st.lists(st.floats(0.0, 1000.0), max_size=50), st.floats(0.01, 100.0))
def test_no_single_first_token_makes_an_engine_much_slower(
    earlier: list[float], stall_s: float
) -> None:
    speed = PrefillSpeed()
    for observed_s in earlier:
        alone(speed, 0.1, observed_s)
    before = speed.slowness
    alone(speed, 0.1, stall_s)
    assert speed.slowness <= MAX_OFF * before


def test_a_stall_is_forgotten_when_the_prompts_behind_it_are_answered() -> None:
    queue: PrefillQueue[PendingRequest] = PrefillQueue()
    names = [str(number) for number in range(20)]
    now_s = 0.0
    for _ in range(3):
        for name in names:
            queue.join(name, PendingRequest(0.1, 2500, 2500, now_s))
        for name in names:
            now_s += 0.1
            queue.finish_prefill(name, now_s)
    for name in names:
        queue.join(name, PendingRequest(0.1, 2500, 2500, now_s))
    now_s += 60.0  # nothing for a minute; then all of them at once
    for name in names:
        queue.finish_prefill(name, now_s)
    assert queue.speed.slowness < 3.0
    for _ in range(10):
        queue.join("a", PendingRequest(1.0, 25_000, 25_000, now_s))
        now_s += 1.0
        queue.finish_prefill("a", now_s)
    assert queue.speed.slowness < 1.5


def test_first_tokens_that_take_no_time_leave_a_speed() -> None:
    speed = PrefillSpeed()
    for _ in range(100):
        alone(speed, 0.1, 0.0)
    assert 0.0 < speed.slowness < 0.1


@pytest.mark.parametrize("times", [4.0, 1 / 4.0])
def test_a_change_of_speed_is_known_after_ten_prompts(times: float) -> None:
    speed = PrefillSpeed()
    for _ in range(500):
        alone(speed, 0.1, 0.1)
    for _ in range(10):
        alone(speed, 0.1, 0.1 * times)
    assert times / 2 < speed.slowness < times * 2


def test_a_much_slower_engine_than_reported_is_learned_after_some_prompts() -> None:
    speed = PrefillSpeed()
    for _ in range(40):
        alone(speed, 0.1, 2.0)
    assert speed.slowness == pytest.approx(20.0, rel=0.35)
