"""A replay of a request log: the cluster in it is modelled as it was."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.replay.fitted_engine import fitted
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.noise import PolicySample, ties
from kvroute.replay.workload.trace import read
from tests.support.request_logs import ENGINE, write_log


def replay(*arguments: object) -> Result:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)], env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result


def said(result: Result) -> str:
    return " ".join(f"{result.stderr} {result.stdout}".split())


def test_the_engine_is_found_from_the_times_of_its_requests(tmp_path: Path) -> None:
    start = EngineModel(replace(ENGINE.prefill, tokens_per_s=1.0), chunk_tokens=4096)
    found = fitted(read(write_log(tmp_path / "log.jsonl"), limit=None, seed=0), start)
    assert found is not None
    assert found.prefill.tokens_per_s == pytest.approx(ENGINE.prefill.tokens_per_s, rel=0.05)
    assert found.step_s == pytest.approx(ENGINE.step_s, rel=0.05)
    assert found.sequence_s == pytest.approx(ENGINE.sequence_s, rel=0.25)
    assert found.overhead_s == pytest.approx(ENGINE.overhead_s, rel=0.25)


def test_a_speed_that_the_log_does_not_show_stays_as_it_was(tmp_path: Path) -> None:
    of_one_token = read(write_log(tmp_path / "log.jsonl", output_length=1), limit=None, seed=0)
    found = fitted(of_one_token, EngineModel(ENGINE.prefill, step_s=0.5))
    assert found is not None
    assert found.step_s == 0.5


def test_a_log_is_replayed_at_its_own_pace_on_its_own_fleet(tmp_path: Path) -> None:
    result = replay(write_log(tmp_path / "log.jsonl"), "--json")
    measured, *modelled = json.loads(result.stdout)
    assert measured["policy"] == "measured"
    assert [row["policy"] for row in modelled] == ["kvroute", "llm-d", "round-robin"]
    assert modelled[0]["ttft_p50_s"] == pytest.approx(measured["ttft_p50_s"], rel=0.15)
    assert modelled[0]["tpot_p90_ms"] == pytest.approx(measured["tpot_p90_ms"], rel=0.15)
    text = said(result)
    assert "From the request log: its pace, 2 replicas, 200,000 tokens of KV cache each" in text
    assert "= 1.00 x the trace's" in text
    assert "NOTE" not in text


def test_options_have_priority_over_the_log(tmp_path: Path) -> None:
    options = ("--replicas", "3", "--kv-tokens", "90000", "--engine", "l4-8b", "--speed", "2")
    text = said(replay(write_log(tmp_path / "log.jsonl"), *options, "--policy", "random"))
    assert "From the request log" not in text
    assert text.startswith("3 x l4-8b, 90,000 tokens of KV cache each; 320 requests")
    assert "2.00 x the trace's" in text


def test_what_the_log_does_not_have_is_said_until_an_option_sets_it(tmp_path: Path) -> None:
    older = write_log(tmp_path / "log.jsonl", {}, host_tokens=100)
    text = said(replay(older, "--policy", "random"))
    assert (
        "2 replicas answered; the log does not say whether there were others (--replicas)" in text
    )
    assert "the log does not have the size of the KV cache (--kv-tokens)" in text
    assert "32,000 tokens came from host memory" in text
    options = ("--replicas", "2", "--kv-tokens", "200000", "--host-tokens", "10000")
    assert "NOTE" not in said(replay(older, "--policy", "random", *options))


def test_a_log_without_first_tokens_is_replayed_on_the_default_engine(tmp_path: Path) -> None:
    text = said(replay(write_log(tmp_path / "log.jsonl", ttft_s=None), "--policy", "random"))
    assert "no request has a first token, so the speed is unknown (--engine)" in text
    assert "2 x h200-8b" in text
    assert "measured" not in text


def test_too_few_requests_to_compare_are_said_with_the_number_that_would_do(tmp_path: Path) -> None:
    file = write_log(tmp_path / "log.jsonl")
    text = said(replay(file, "--limit", "40", "--policy", "random,round-robin,least-loaded"))
    assert "the number of requests that would show them is about" in text
    assert "this trace has 40" in text
    text = said(replay(file, "--limit", "20", "--policy", "random,round-robin"))
    assert "20 requests are too few to compare policies; with fewer than 23" in text


def test_the_number_of_requests_that_would_do_follows_from_the_noise() -> None:
    rng = np.random.default_rng(1)

    def sample(ttft_s: float, count: int) -> PolicySample:
        times_s = ttft_s * rng.lognormal(0, 1, count)
        return PolicySample(times_s, np.full(count, 1.0), np.full(count, 2.0))

    few = ties({"best": sample(1.0, 200), "worse": sample(1.2, 200)})
    times = few["ttft_p50_s"]["worse"]
    assert 1 < times < 50
    many = int(4 * 200 * times)
    assert not ties({"best": sample(1.0, many), "worse": sample(1.2, many)})["ttft_p50_s"]
