"""A cluster's speed comes back from the times of its tokens, and a replay takes it."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.calibration.fit import Decode, FitError, Prefill, fit, non_negative_fit
from kvroute.replay.calibration.measure import (
    Stream,
    decode_sample,
    median_decodes,
    median_prefills,
)
from kvroute.replay.calibration.model import EngineModel
from kvroute.replay.calibration.profiles import Profile

ENGINE = EngineModel(PrefillModel(12_000.0, 20_000.0), 8e-3, 3e-4, 5e-8)
OVERHEAD_S = 0.004
LENGTHS = [64 * 2**n for n in range(10)]  # beyond one step's tokens
BATCHES = [(1, 80), (2, 160), (4, 320), (8, 640), (16, 1280), (1, 30_000), (4, 120_000)]


def first_token_s(tokens: int) -> float:
    """What ENGINE makes a client wait for."""
    steps = -(-tokens // ENGINE.chunk_tokens)
    prefill_s = ENGINE.prefill.seconds(0, tokens)
    return OVERHEAD_S + prefill_s + steps * (ENGINE.step_s + ENGINE.sequence_s)


def step_s(sequences: int, context_tokens: int) -> float:
    each_s = ENGINE.sequence_s * sequences + ENGINE.context_token_s * context_tokens
    return ENGINE.step_s + each_s


PREFILLS = [Prefill(tokens, first_token_s(tokens)) for tokens in LENGTHS]
DECODES = [Decode(*batch, step_s(*batch)) for batch in BATCHES]


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def test_exact_times_give_the_engine_back() -> None:
    found = fit(PREFILLS, DECODES)
    assert found.engine.prefill.tokens_per_s == pytest.approx(12_000)
    assert found.engine.prefill.attention_tokens == pytest.approx(20_000)
    assert found.engine.step_s == pytest.approx(8e-3)
    assert found.engine.sequence_s == pytest.approx(3e-4)
    assert found.engine.context_token_s == pytest.approx(5e-8)
    assert found.overhead_s == pytest.approx(OVERHEAD_S)
    assert max(found.prefill_error, found.decode_error) < 1e-6


def test_times_that_miss_by_a_tenth_say_so() -> None:
    wrong = [replace(s, ttft_s=s.ttft_s * (1.1 if n % 2 else 0.9)) for n, s in enumerate(PREFILLS)]
    found = fit(wrong, DECODES)
    assert 0.05 < found.prefill_error < 0.1
    assert found.engine.prefill.tokens_per_s == pytest.approx(12_000, rel=0.3)


def test_what_would_take_less_than_no_time_takes_none() -> None:
    falling = [Decode(1, 100, 0.010), Decode(1, 1000, 0.009), Decode(2, 100, 0.011)]
    found = fit(PREFILLS, falling)
    assert found.engine.context_token_s == 0
    assert found.engine.step_s + found.engine.sequence_s == pytest.approx(0.0095, rel=0.02)


def test_the_best_non_negative_fit_leaves_out_what_hurts() -> None:
    coefficients, error = non_negative_fit([[1, 1], [1, 2], [1, 3]], [3.0, 2.0, 1.0])
    weights = [1 / 9, 1 / 4, 1]  # deviations count as shares of 3, 2 and 1
    mean = (3 * weights[0] + 2 * weights[1] + 1 * weights[2]) / sum(weights)
    assert coefficients == pytest.approx([mean, 0])
    assert error > 0


def test_an_engine_without_attention_still_is_a_profile() -> None:
    linear = [Prefill(tokens, 0.01 + tokens / 1000) for tokens in LENGTHS]
    engine = fit(linear, [replace(sample, step_s=0.001) for sample in DECODES]).engine
    assert engine.prefill.seconds(0, 10_000) == pytest.approx(10, rel=0.01)
    assert Profile.of(engine, 1000).engine().prefill.attention_tokens > 1e6


def test_times_that_do_not_grow_are_no_engine() -> None:
    with pytest.raises(FitError, match="hardly grows"):
        fit([replace(sample, ttft_s=0.02) for sample in PREFILLS], DECODES)
    with pytest.raises(FitError, match="no time"):
        fit(PREFILLS, [replace(sample, step_s=0.001 * sample.sequences) for sample in DECODES])


def test_a_batch_is_timed_while_all_of_it_decodes() -> None:
    early = Stream("r", 100, 0.0, [1.0 + 0.5 * n for n in range(6)] + [4.0 + n for n in range(30)])
    late = Stream("r", 200, 0.0, [4.0 + n for n in range(21)])
    sample = decode_sample([early, late])
    assert sample is not None
    assert (sample.sequences, sample.step_s) == (2, 1.0)
    # steps 4 -> 24: after 7 tokens of the one's answer and 1 of the other's, and 19 more
    assert sample.context_tokens == (100 + 7 + 9.5) + (200 + 1 + 9.5)


def test_tokens_that_come_in_pairs_count_one_by_one() -> None:
    pairs = Stream("r", 10, 0.0, [float(n // 2) for n in range(32)])
    sample = decode_sample([pairs])
    assert sample is not None
    assert sample.step_s == pytest.approx(0.5, rel=0.05)


def test_streams_that_hardly_meet_say_nothing() -> None:
    one = Stream("r", 10, 0.0, [float(n) for n in range(10)])
    other = Stream("r", 10, 0.0, [float(n) for n in range(8, 18)])
    assert decode_sample([one, other]) is None


def test_repetitions_count_by_their_median() -> None:
    assert median_prefills([Prefill(64, s) for s in (3.0, 1.0, 2.0)]) == [Prefill(64, 2.0)]
    steps = [Decode(2, 100, s) for s in (9.0, 1.0, 2.0)] + [Decode(3, 100, 5.0)]
    assert median_decodes(steps) == [Decode(2, 100, 2.0), Decode(3, 100, 5.0)]


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost", "http://["])
def test_where_no_cluster_is_the_remedy_is_named(url: str) -> None:
    result = run("calibrate", "--url", url)
    assert result.exit_code == 1
    assert f"--url is {url!r}" in result.stderr
    assert "kvroute serve" in result.stderr


def test_a_file_without_a_folder_is_refused_before_anything_is_measured() -> None:
    result = run("calibrate", "--output", "nowhere/file")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
