"""vLLM's engine arguments, as a user gives them; tests/slow/engines asks vLLM itself."""

from typing import Any

import pytest

from kvroute.settings.help import SettingsError, env_names, flags
from kvroute.settings.owned_engine_args import FIXED, OWNED
from kvroute.settings.serve import OPTIONS, ServeSettings, load


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in ServeSettings.model_fields.items():
        for variable in env_names(name, field):
            monkeypatch.delenv(variable, raising=False)


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ({"seed": 1, "quantization": "fp8"}, {"seed": 1, "quantization": "fp8"}),  # serve.yaml
        (['{"seed": 1, "quantization": "fp8"}'], {"seed": 1, "quantization": "fp8"}),
        (["quantization=fp8"], {"quantization": "fp8"}),
        (["gpu_memory_utilization=0.85", "seed=7"], {"gpu_memory_utilization": 0.85, "seed": 7}),
        (["enforce_eager=true", "hf_token=null"], {"enforce_eager": True, "hf_token": None}),
        (
            ['hf_overrides={"a": [1]}', "load_format="],
            {"hf_overrides": {"a": [1]}, "load_format": ""},
        ),
        (["generation_config=a=b"], {"generation_config": "a=b"}),
        (["gpu-memory-utilization=0.5"], {"gpu_memory_utilization": 0.5}),
    ],
)
def test_a_value_is_json_where_it_can_be_and_else_a_string(given: Any, meant: object) -> None:
    assert load({"engine_args": given}).engine_args == meant


def test_a_name_value_pair_has_priority_over_the_object_in_any_order() -> None:
    given = ["seed=1", '{"seed": 2, "enforce_eager": true}']
    assert load({"engine_args": given}).engine_args == {"seed": 1, "enforce_eager": True}


def test_both_spellings_are_of_one_option() -> None:
    assert flags("engine_args", OPTIONS["engine_args"]) == ("--engine-args", "--engine-arg")


def test_the_environment_has_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_ENGINE_ARGS", '{"seed": 1}')
    assert load({}).engine_args == {"seed": 1}
    assert load({"engine_args": ["enforce_eager=true"]}).engine_args == {"enforce_eager": True}


def test_a_models_own_arguments_are_added_to_those_of_all() -> None:
    models = [{"model": "a", "engine_args": {"seed": 2}}, {"model": "b"}]
    each = load({"models": models, "engine_args": {"seed": 1, "enforce_eager": True}}).per_model
    assert [one.engine_args["seed"] for one in each] == [2, 1]
    assert all(one.engine_args["enforce_eager"] for one in each)


@pytest.mark.parametrize("text", ["seed", "=1", "[1]", "", "{"])
def test_an_invalid_argument_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--engine-args is .*expected .* such as"):
        load({"engine_args": [text]})


@pytest.mark.parametrize("name", OWNED)
def test_an_argument_that_has_an_option_here_is_refused_with_its_name(name: str) -> None:
    with pytest.raises(
        SettingsError, match=rf"--engine-args: {name} cannot be set here; use {OWNED[name]}"
    ):
        load({"engine_args": {name: 1}})


def test_the_options_that_a_refusal_names_exist() -> None:
    known = {flag for name, field in OPTIONS.items() for flag in flags(name, field)}
    named = {option for option in OWNED.values() if option.startswith("--")}
    assert named <= {flag for each in known for flag in each.split("/")}


@pytest.mark.parametrize("name", FIXED)
def test_an_argument_that_cannot_be_changed_is_refused(name: str) -> None:
    with pytest.raises(SettingsError, match=f"--engine-args: {name} cannot be changed "):
        load({"engine_args": {name: 1}})


def test_a_refusal_names_the_model() -> None:
    models = [{"model": "a"}, {"model": "b", "engine_args": {"block_size": 8}}]
    with pytest.raises(
        SettingsError, match=r"models\[1\]: --engine-args: block_size .*--block-size"
    ):
        load({"models": models})


def test_the_simulated_engine_refuses_engine_arguments() -> None:
    with pytest.raises(
        SettingsError, match=r"--engine-args is .* only works with vLLM; leave it out"
    ):
        load({"engine": "simulated", "engine_args": {"seed": 1}})
