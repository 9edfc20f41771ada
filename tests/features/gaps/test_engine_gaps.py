"""How many prompt tokens a step may compute beside answers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.engine_feature import ComputedPart, EngineFeatures, PendingPrompt
from kvroute.features.gaps import LIMITS, GapLimits
from kvroute.features.gaps.engine_gaps import LARGEST_SHARE, SMALLEST_PART, EngineGaps

FIXED_S, TOKEN_S = 0.010, 0.000_1
LIMIT_S, FIRST_S = 0.030, 2.0
WITHIN_LIMIT = round((LIMIT_S - FIXED_S) / TOKEN_S)


def gaps() -> EngineGaps:
    """Return the limit of an engine whose speed is known."""
    engine = EngineGaps(tpot_s=LIMIT_S, ttft_s=FIRST_S)
    engine.step_ended(FIXED_S, [])
    engine.step_ended(FIXED_S + 1000 * TOKEN_S, [ComputedPart(0, 1000)])
    return engine


def waiting(tokens: int, waited_s: float = 0.0) -> PendingPrompt:
    return PendingPrompt(0, tokens, waited_s)


def test_a_step_takes_as_long_as_answers_allow() -> None:
    assert gaps().prompt_tokens([b""] * 8, [waiting(5000)]) == pytest.approx(WITHIN_LIMIT, abs=1)


def test_nothing_is_limited_without_answers_prompts_or_measurements() -> None:
    assert gaps().prompt_tokens([], [waiting(5000)]) is None
    assert gaps().prompt_tokens([b""], []) is None
    assert EngineGaps(tpot_s=LIMIT_S, ttft_s=FIRST_S).prompt_tokens([b""], [waiting(1)]) is None


def test_a_request_chooses_its_own_limit_and_the_strictest_counts() -> None:
    strict = gaps().prompt_tokens([b"", b"20", b"60"], [waiting(5000)])
    assert strict == pytest.approx((0.020 - FIXED_S) / TOKEN_S, abs=1)
    assert gaps().prompt_tokens([b"0", b"0"], [waiting(5000)]) is None
    assert gaps().prompt_tokens([b"0", b""], [waiting(5000)]) == pytest.approx(WITHIN_LIMIT, abs=1)


def test_prompts_are_computed_even_if_no_step_can_keep_the_limit() -> None:
    least = SMALLEST_PART * FIXED_S / TOKEN_S
    assert gaps().prompt_tokens([b"1"], [waiting(50)]) == pytest.approx(least, abs=1)


@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.floats(0.0, 3.0))
def test_first_tokens_are_in_time_if_that_is_possible(tokens: list[int], waited_s: float) -> None:
    prompts = [waiting(each, waited_s) for each in tokens]
    allowed = gaps().prompt_tokens([b""], prompts)
    assert allowed is not None
    needed_s, left_s = sum(tokens) * TOKEN_S, FIRST_S - waited_s
    needed_share = min(LARGEST_SHARE, needed_s / left_s if left_s > 0 else 1.0)
    share = allowed * TOKEN_S / (FIXED_S + allowed * TOKEN_S)  # of the time, for prompts
    assert share >= needed_share - 0.01
    # No step is longer than one of these two reasons requires.
    assert allowed <= max(WITHIN_LIMIT, needed_share / (1 - needed_share) * FIXED_S / TOKEN_S) + 1


@given(st.integers(1, 100), st.integers(0, 100))
def test_more_or_older_prompts_never_get_fewer_tokens(count: int, more: int) -> None:
    engine, prompts = gaps(), [waiting(150)] * count

    def allowed(pending: list[PendingPrompt]) -> float:
        tokens = engine.prompt_tokens([b""], pending)
        return float("inf") if tokens is None else tokens

    assert allowed(prompts + [waiting(150)] * more) >= allowed(prompts)
    assert allowed([waiting(150, 1.0)] * count) >= allowed(prompts)


def test_the_engine_is_limited_only_by_its_variable() -> None:
    assert GapLimits().engine({}) is None
    engine = GapLimits().engine({LIMITS: "30 1500"})
    assert engine is not None
    features = EngineFeatures([engine])
    for took_s, parts in ((FIXED_S, []), (FIXED_S + 0.1, [ComputedPart(0, 1000)])):
        features.step_ended(took_s, parts)

    def tokens(data: dict[str, bytes]) -> int:
        return features.prompt_tokens(8192, lambda: [data], lambda: [waiting(5000)])

    assert tokens({}) == pytest.approx(WITHIN_LIMIT, abs=1)
    assert tokens({"another": b"1"}) == tokens({})
    assert tokens({"gaps": b"0"}) == 8192
