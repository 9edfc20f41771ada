"""A replay's report: what is modelled, the best values, and which differences are noise."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.command.replay_command import EXAMPLE_TRACE
from kvroute.replay.noise import PolicySample, ties
from tests.support.traces import example, lines

WIDTH = 80


def replay(*options: str) -> Result:
    result = CliRunner().invoke(app, ["replay", *options], env={"COLUMNS": str(WIDTH)})
    assert result.exit_code == 0, result.output
    return result


def test_the_example_is_the_one_that_its_generator_makes() -> None:
    assert EXAMPLE_TRACE.read_text().splitlines() == [*lines(example(7))]


def test_the_example_shows_what_is_modelled_and_marks_the_best_and_noise() -> None:
    text = replay("--example", "--limit", "300", "--policy", "kvroute,llm-d,round-robin").stdout
    first = " ".join(text.split("\n\n")[0].split())
    assert first.startswith("4 x h200-8b, 60,000 tokens of KV cache each; 300 requests, ")
    assert " = 80% of saturation (" in first
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
    assert "* is the best value." in text
    assert ("~" in text) is ("WARNING" in text)
    rows = [line.split() for line in text.splitlines() if line.startswith(("kvroute", "llm-d"))]
    assert any(cell.startswith("*") for row in rows for cell in row)


def test_options_replace_those_of_the_example() -> None:
    result = replay(
        *("--example", "--limit", "100", "--policy", "random", "--replicas", "2", "--json"),
        *("--kv-tokens", "50000", "--rate", "5", "--slow", "0.5:0.8", "--routers", "2"),
    )
    assert [row["policy"] for row in json.loads(result.stdout)] == ["random"]
    assert " ".join(result.stderr.split()).startswith(
        "2 x h200-8b, 50,000 tokens of KV cache each, 2 routers, 50% of the replicas at 80% of the "
        "speed; 100 requests, 5.00 requests/s = "
    )


@pytest.mark.parametrize("arguments", [(), (str(EXAMPLE_TRACE), "--example")])
def test_a_replay_needs_a_trace_a_shape_or_the_example(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["replay", *arguments])
    assert result.exit_code == 2
    assert "set one of TRACE, --shape and --example" in result.output


def test_the_longest_names_of_policies_fit(tmp_path: Path) -> None:
    policies = "power-of-two,least-loaded,consistent-hash"
    text = replay(
        *("--example", "--limit", "100", "--rate", "5", "--policy", policies),
        *("--closed-loop", "--host-tokens", "100000", "--kv-tokens", "20000"),
    ).stdout
    assert max(map(len, text.splitlines())) <= WIDTH
    assert {*policies.split(",")} <= {*text.split()}
    assert "in host memory" in text


def sample(rng: np.random.Generator, *, ttft_s: float, hits: float) -> PolicySample:
    times_s = ttft_s * rng.lognormal(0, 1, 1000)
    return PolicySample(times_s, np.full(1000, hits), np.full(1000, 100.0))


def test_a_small_difference_is_noise_and_a_large_one_is_not() -> None:
    rng = np.random.default_rng(1)
    samples = {
        "best": sample(rng, ttft_s=1.0, hits=50.0),
        "like it": sample(rng, ttft_s=1.01, hits=50.0),
        "worse": sample(rng, ttft_s=2.0, hits=40.0),
    }
    found = ties(samples)
    assert {*found["ttft_p50_s"]} < {"best", "like it"}
    assert len(found["ttft_p50_s"]) == 1
    assert {*found["hit_share"]} == {"like it"}
    assert all("worse" not in tied for tied in found.values())


def test_one_policy_has_no_ties_and_few_requests_are_not_compared() -> None:
    many = sample(np.random.default_rng(1), ttft_s=1.0, hits=50.0)
    assert {*map(len, ties({"only": many}).values())} == {0}
    few = PolicySample(np.array([1.0, 2.0]), np.array([0.0, 1.0]), np.array([2.0, 2.0]))
    assert ties({"one": few, "other": few}) == {}
