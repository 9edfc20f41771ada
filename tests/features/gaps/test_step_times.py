"""The times of an engine's steps are learned, and a number of tokens follows from a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.engine_feature import ComputedPart
from kvroute.features.gaps.step_times import StepTimes

FIXED_S = 0.012
SPEEDS = st.floats(1e-6, 1e-2)  # seconds of a prompt token without attention
ATTENTION = st.floats(5000.0, 1e6)  # context at which a token costs twice as much


def learned(token_s: float, attention_tokens: float, parts: list[ComputedPart]) -> StepTimes:
    """Return what is learned from steps of an engine with these times."""
    times = StepTimes()
    times.learn(FIXED_S, [])
    for part in parts:
        tokens, contexts = part.end - part.start, (part.end**2 - part.start**2) / 2
        times.learn(FIXED_S + token_s * (tokens + contexts / attention_tokens), [part])
    return times


@given(SPEEDS, ATTENTION, st.lists(st.tuples(st.integers(0, 100_000), st.integers(64, 8192))))
def test_what_was_measured_is_expected_again(
    token_s: float, attention_tokens: float, drawn: list[tuple[int, int]]
) -> None:
    parts = [ComputedPart(start, start + tokens) for start, tokens in drawn]
    times = learned(token_s, attention_tokens, [*parts, ComputedPart(0, 8192)] * 40)
    contexts = {part.start + part.end for part in parts}
    if max(contexts, default=0) > 100_000:  # so the two parts of the cost can be told apart
        assert times.prompt_s(20_000, 21_000) == pytest.approx(
            token_s * (1000 + 1000 * 20_500 / attention_tokens), rel=0.02
        )
    assert times.fixed_s == FIXED_S


@given(SPEEDS, ATTENTION, st.integers(0, 100_000), st.floats(0.0, 1.0))
def test_as_many_tokens_as_a_time_allows(
    token_s: float, attention_tokens: float, start: int, seconds: float
) -> None:
    times = StepTimes(FIXED_S, token_s, token_s / attention_tokens)
    tokens = times.tokens_in(seconds, start)
    assert times.prompt_s(start, start + tokens) <= seconds * (1 + 1e-6) + 1e-12
    assert times.prompt_s(start, start + tokens + 1) >= seconds * (1 - 1e-6)


def test_one_long_step_does_not_count_for_much() -> None:
    times = learned(1e-4, 1e9, [ComputedPart(0, 1000)] * 20)
    usual_s = times.prompt_s(0, 1000)
    times.learn(30.0, [ComputedPart(0, 1000)])  # something else stopped the engine
    assert times.prompt_s(0, 1000) < 1.5 * usual_s
    times.learn(30.0, [])
    assert times.fixed_s < 1.5 * FIXED_S


def test_another_speed_is_learned() -> None:
    times = learned(1e-4, 1e9, [ComputedPart(0, 1000)] * 200)
    for _ in range(200):
        times.learn(FIXED_S + 0.3, [ComputedPart(0, 1000)])
    assert times.prompt_s(0, 1000) == pytest.approx(0.3, rel=0.05)


def test_without_measurements_no_time_is_enough_for_a_token() -> None:
    assert StepTimes().tokens_in(math.inf, 0) == 0
