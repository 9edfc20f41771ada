"""What a replica is in a replay: a profile by name, or a file that says what is different."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.hardware.profiles import (
    A100,
    DEFAULT_ENGINE,
    H100,
    H200,
    L4,
    LLAMA_8B,
    PROFILES,
    GpuPeak,
    Profile,
    ProfileError,
    derived,
    load_profile,
)

REPLAY = Path(__file__).parents[2] / "docs/replay.md"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 100 * n, "input_length": 3000, "output_length": 5, "hash_ids": [n] * 5}
        for n in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def said(result: Result) -> str:
    """Standard error without the frame of an error message."""
    return " ".join(result.stderr.replace("│", " ").split())


def test_the_default_profile_is_the_formula_rounded() -> None:
    default = PROFILES[DEFAULT_ENGINE]
    formula = derived(H200, LLAMA_8B)
    assert default.engine() == EngineModel()
    for name, number in formula:
        assert getattr(default, name) == pytest.approx(number, rel=0.08), name


def test_more_gpus_are_faster_and_hold_more() -> None:
    one, four = derived(H200, LLAMA_8B), derived(H200, LLAMA_8B, gpus=4)
    assert four.prefill_tokens_per_s == pytest.approx(4 * one.prefill_tokens_per_s)
    assert four.step_s < one.step_s
    assert four.kv_tokens > 4 * one.kv_tokens  # the weights are there once


@pytest.mark.parametrize(
    ("name", "gpu"), [("H200", H200), ("H100", H100), ("A100", A100), ("L4", L4)]
)
def test_the_documents_have_the_assumed_copies_of_each_gpu_and_their_source(
    name: str, gpu: GpuPeak
) -> None:
    (row,) = re.findall(rf"^\|.*\[{name}\]\(https://www\.nvidia\.com/.*$", REPLAY.read_text(), re.M)
    *_, one_way, assumed = re.findall(r"(\d+) GB/s", row)
    assert float(assumed) == gpu.host_gb_per_s == pytest.approx(0.8 * float(one_way), rel=0.03)


def test_help_lists_the_profiles() -> None:
    shown = "".join(run("replay", "--help").stdout.split())
    assert all(name in shown for name in PROFILES)


def test_a_file_says_only_what_is_different(tmp_path: Path) -> None:
    path = tmp_path / "slow.json"
    path.write_text('{"step_s": 1, "kv_tokens": 100000}')
    assert load_profile(str(path)) == Profile(step_s=1, kv_tokens=100_000)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"step_s": "fast"}', "step_s is 'fast'; expected a valid number, such as 0.005"),
        ('{"step_s": 0}', "step_s is 0; expected more than 0"),
        ('{"step_s": NaN}', "step_s is nan; expected a finite number"),
        ('{"kv_tokens": 1.5}', "kv_tokens is 1.5; expected a valid integer, such as 800000"),
        ('{"kv_tokens": true}', "kv_tokens is True; expected a valid integer"),
        ('{"steps": 1}', "'steps' is not a field of a profile; expected prefill_tokens_per_s,"),
        ("[]", 'expected an object such as {"prefill_tokens_per_s"'),
        ("{", "Invalid JSON"),
    ],
)
def test_a_wrong_file_says_what_is_right(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "engine.json"
    path.write_text(content)
    with pytest.raises(ProfileError) as refused:
        load_profile(str(path))
    assert f"{path}: " in str(refused.value)
    assert message in str(refused.value)


def test_an_engine_that_is_neither_name_nor_file_is_refused(trace: Path) -> None:
    result = run("replay", trace, "--engine", "h300-8b")
    assert result.exit_code == 2
    assert "--engine is 'h300-8b'" in said(result)
    assert "expected one of h200-8b, h100-8b" in said(result)


def test_a_slower_engine_answers_later_in_a_replay(trace: Path) -> None:
    def ttft_s(engine: str) -> float:
        result = run("replay", trace, "--speed", 1, "--engine", engine, "--json")
        return float(json.loads(result.stdout)[0]["ttft_p50_s"])

    assert ttft_s("l4-8b") > 5 * ttft_s("h200-8b")


def test_the_engine_brings_its_cache_and_an_option_wins(trace: Path) -> None:
    small = run("replay", trace, "--speed", 1, "--engine", "l4-8b", "--kv-tokens", 1024)
    assert "but a replica has 1024" in small.stderr
    assert run("replay", trace, "--speed", 1, "--engine", "l4-8b").exit_code == 0
