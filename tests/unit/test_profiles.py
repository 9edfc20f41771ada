"""What a replica is in a replay: a profile by name, or a file that says what is different."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvroute.cli import app
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.hardware.model_config import load_model
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


QWEN3_32B = {
    "num_hidden_layers": 64,
    "hidden_size": 5120,
    "num_attention_heads": 64,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "intermediate_size": 25600,
    "vocab_size": 151936,
}
GPT_OSS_120B = {
    "num_hidden_layers": 36,
    "hidden_size": 2880,
    "num_attention_heads": 64,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 2880,
    "vocab_size": 201088,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
    "quantization_config": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize(
    ("config", "parameters", "active", "layers", "gigabytes"),
    [(QWEN3_32B, 32.8e9, 32.8e9, 64, 65.5), (GPT_OSS_120B, 116.8e9, 5.7e9, 18, 63.0)],
)
def test_a_models_shape_is_read_from_its_config(
    config: dict[str, object],
    parameters: float,
    active: float,
    layers: int,
    gigabytes: float,
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path)
    assert model.parameters == pytest.approx(parameters, rel=0.03)
    unused = (1 - model.expert_share) * model.expert_parameters
    assert model.parameters - unused == pytest.approx(active, rel=0.06)
    assert model.layers == layers
    assert model.weight_bytes * model.parameters / 1e9 == pytest.approx(gigabytes, rel=0.04)


def test_the_config_of_a_model_with_a_text_part_is_found(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner.json", tmp_path / "outer.json"
    inner.write_text(json.dumps(QWEN3_32B))
    outer.write_text(json.dumps({"text_config": QWEN3_32B, "vision_config": {}}))
    assert load_model(inner) == load_model(outer)


def test_an_engine_is_derived_from_a_gpu_and_a_config(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(QWEN3_32B))
    options = ("replay", trace, "--replicas", 2, "--rate", 1, "--model-config", config)
    result = run(*options, "--engine", "h100", "--gpus", 2)
    assert "299," in result.stdout  # thousands of tokens of KV cache
    assert "set a larger --gpus" in said(run(*options, "--engine", "l4"))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--engine", "h100"), "set --model-config"),
        (("--gpus", 2), "needs --model-config"),
        (("--model-config", "config.json"), "expected a GPU"),
        (("--engine", "h100", "--model-config", "missing"), "expected the config.json"),
    ],
)
def test_wrong_options_of_a_derived_engine_are_named(
    trace: Path, options: tuple[object, ...], expected: str
) -> None:
    result = run("replay", trace, *options)
    assert result.exit_code == 2
    assert expected in said(result)


def test_a_config_without_a_needed_field_is_named(trace: Path, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"hidden_size": 64}))
    result = run("replay", trace, "--engine", "h100", "--model-config", config)
    assert "num_hidden_layers" in said(result)


def test_the_report_of_a_gpu_check_is_a_profile(tmp_path: Path) -> None:
    report = tmp_path / "gpu-report.md"
    report.write_text('# GPU check\n\n- ready\n- `{"step_s": 0.007, "chunk_tokens": 4096}`\n- x\n')
    assert load_profile(str(report)) == Profile(step_s=0.007, chunk_tokens=4096)
