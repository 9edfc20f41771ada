"""The workloads of published benchmarks, the time between tokens, and --slo."""

import itertools
import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.replay.token_gaps import TokenGaps
from kvroute.replay.workload.published_shapes import SHAPES, shaped


def test_shared_prefix_has_750_prompts_in_150_groups_which_repeat() -> None:
    requests = shaped("shared-prefix", 1000, seed=1)
    assert {(each.input_tokens, each.output_tokens) for each in requests} == {(7200, 1000)}
    prompts = [each.blocks for each in requests]
    assert len({*prompts}) == 750
    assert prompts[750:] == prompts[:250]
    groups = [blocks[: 6000 // 16] for blocks in {*prompts}]
    assert {groups.count(group) for group in groups} == {5}
    assert len({blocks[6000 // 16] for blocks in prompts}) == 750


def test_turns_of_code_generation_begin_with_the_turn_before_and_its_answer() -> None:
    requests = shaped("code-generation", 600, seed=1)
    first = [a for a, b in itertools.pairwise(requests) if a.session != b.session]
    assert min(each.input_tokens for each in requests) >= 3_000
    assert len(first) > 20
    for turn, later in itertools.pairwise(requests):
        if turn.session == later.session:
            assert later.input_tokens == turn.input_tokens + 800 + 1_500
            assert later.blocks[: len(turn.blocks)] == turn.blocks


@pytest.mark.parametrize("name", SHAPES)
def test_equal_seeds_give_equal_shapes(name: str) -> None:
    assert shaped(name, 50, seed=3) == shaped(name, 50, seed=3)
    assert len(shaped(name, 50, seed=3)) == 50


def test_the_percentiles_of_gaps_are_those_of_the_counted_times() -> None:
    times_s = np.random.default_rng(0).lognormal(-3.0, 1.0, 5000)
    gaps, twice = TokenGaps(), TokenGaps()
    for time_s in times_s:
        gaps.add(time_s)
    twice.update(gaps)
    twice.update(gaps)
    assert twice.percentiles_s(0.5, 0.9, 0.99) == pytest.approx(
        np.percentile(times_s, [50, 90, 99]), rel=0.02
    )


def test_a_shape_is_replayed_with_limits_of_both_times() -> None:
    options = ["--shape", "reasoning", "--limit", "20", "--rate", "2", "--replicas", "1", "--json"]
    rows = []
    for slo in ("ttft=100,tpot=100", "ttft=100,tpot=0.001", "ttft=100"):
        result = CliRunner().invoke(app, ["replay", *options, "--slo", slo])
        rows += json.loads(result.stdout)
    assert [row["goodput"] for row in rows] == [1.0, 0.0, 1.0]
    assert 0 < rows[0]["itl_p50_ms"] <= rows[0]["itl_p99_ms"]


@pytest.mark.parametrize("slo", ["ttft", "ttft=fast", "ttft=-1", "latency=2", "ttft=1:2"])
def test_a_wrong_slo_is_named(slo: str) -> None:
    result = CliRunner().invoke(app, ["replay", "--example", "--slo", slo])
    assert result.exit_code == 2
    assert repr(slo) in result.output
    assert "ttft=2,tpot=0.05" in result.output


def test_an_unknown_shape_is_named_with_the_known_ones() -> None:
    result = CliRunner().invoke(app, ["replay", "--shape", "round"])
    assert "round" in result.output
    assert "shared-prefix" in result.output
