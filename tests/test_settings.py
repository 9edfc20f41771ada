"""Where a setting comes from, and what is said when it cannot be used."""

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from router.cli import app
from router.command.options import SettingsError, env_names, flags
from router.settings import ServeSettings, load


def serve_command() -> TyperCommand:
    group = get_command(app)
    assert isinstance(group, TyperGroup)
    command = group.commands["serve"]
    assert isinstance(command, TyperCommand)
    return command


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in ServeSettings.model_fields.items():
        for variable in env_names(name, field):
            monkeypatch.delenv(variable, raising=False)


def test_defaults_suit_a_laptop() -> None:
    settings = load({})
    assert (settings.model, settings.replicas, settings.port) == ("SmolLM2-135M-Instruct", 2, 8000)
    assert settings.prefix_caching


def test_environment_beats_the_default_and_the_command_line_beats_both(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTE_PORT", "9000")
    assert load({}).port == 9000
    assert load({"port": 9001}).port == 9001


def test_an_empty_variable_sets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVROUTE_REDIS_URL", "")
    assert load({}).redis_url is None


@pytest.mark.parametrize(
    "variable", ["KVROUTE_PREFIX_CACHING", "REUSE_CACHE", "NIM_ENABLE_KV_CACHE_REUSE"]
)
@pytest.mark.parametrize(("value", "on"), [("0", False), ("false", False), ("1", True)])
def test_other_systems_names_switch_the_cache(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, on: bool
) -> None:
    monkeypatch.setenv(variable, value)
    assert load({}).prefix_caching is on


def test_another_systems_name_sets_the_block_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEQ_SIZE_PER_BLOCK", "64")
    assert load({}).block_size == 64


def test_names_that_contradict_each_other_stop_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSE_CACHE", "1")
    monkeypatch.setenv("NIM_ENABLE_KV_CACHE_REUSE", "0")
    with pytest.raises(SettingsError, match=r"REUSE_CACHE is '1'.*--no-prefix-caching"):
        load({})


def test_names_that_agree_are_welcome(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSE_CACHE", "0")
    monkeypatch.setenv("NIM_ENABLE_KV_CACHE_REUSE", "false")
    assert not load({}).prefix_caching


def test_a_flag_settles_any_quarrel_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REUSE_CACHE", "perhaps")
    monkeypatch.setenv("NIM_ENABLE_KV_CACHE_REUSE", "0")
    assert load({"prefix_caching": True}).prefix_caching


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "REUSE_CACHE",
            "maybe",
            "REUSE_CACHE is 'maybe'; expected a valid boolean, such as 1 or 0",
        ),
        ("KVROUTE_PORT", "abc", "KVROUTE_PORT is 'abc'; expected a valid integer, such as 8000"),
        ("SEQ_SIZE_PER_BLOCK", "0", "SEQ_SIZE_PER_BLOCK is '0'; expected at least 1, such as 32"),
        ("KVROUTE_ENGINE", "trt", "expected 'vllm' or 'simulated', such as vllm"),
    ],
)
def test_a_bad_variable_is_named_with_its_value_and_the_remedy(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(SettingsError) as error:
        load({})
    assert message in str(error.value)


def test_a_bad_flag_is_named_as_it_was_written() -> None:
    with pytest.raises(SettingsError, match="--replicas is 0; expected at least 1, such as 2"):
        load({"replicas": 0})


def test_a_setting_that_does_not_exist_is_refused() -> None:
    with pytest.raises(SettingsError, match="replica is no setting; there are model, "):
        load({"replica": 2})


@pytest.mark.parametrize("name", ServeSettings.model_fields)
def test_every_setting_has_a_flag_a_variable_and_a_help_text(name: str) -> None:
    field = ServeSettings.model_fields[name]
    offered = {each.name: each for each in serve_command().params}[name]
    assert {*offered.opts, *offered.secondary_opts} == set("/".join(flags(name, field)).split("/"))
    assert f"KVROUTE_{name.upper()}" in str(vars(offered)["help"])


def test_the_parts_for_replica_and_router_carry_what_was_decided() -> None:
    settings = load({"redis_url": "redis://r", "block_size": 64, "replicas": 3})
    assert settings.replica().served_model_name == "SmolLM2-135M-Instruct"
    assert settings.replica().block_size == settings.router().block_size == 64


def test_blocks_are_larger_on_cpus() -> None:
    assert load({"redis_url": "redis://r"}).router().block_size == 32
    assert load({"redis_url": "redis://r", "gpus_per_replica": 1}).router().block_size == 16


def test_a_round_trip_through_plain_data_changes_nothing() -> None:
    settings = load({"redis_url": "redis://r", "engine": "simulated"})
    assert ServeSettings.model_validate(settings.model_dump(mode="json")) == settings


def test_models_that_are_only_named_have_everything_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTE_MODEL", "a, b")
    for settings in (load({"replicas": 3}), load({"replicas": 3, "model": ["a", "b"]})):
        assert [(one.model, one.replicas) for one in settings.each()] == [("a", 3), ("b", 3)]


def test_each_of_several_models_may_have_settings_of_its_own() -> None:
    models = '[{"model": "a", "served_model_name": "fast", "block_size": 64}, {"replicas": 1}]'
    first, second = load({"models": models, "pin_share": 0.1, "redis_url": "redis://r"}).each()
    assert (first.name, first.model, first.replicas) == ("fast", "a", 2)
    assert (second.name, second.replicas) == ("SmolLM2-135M-Instruct", 1)
    assert (first.router().block_size, second.router().block_size) == (64, 32)
    assert first.replica().pin_share == second.replica().pin_share == 0.1


def test_models_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    settings = load({"redis_url": "redis://r", "replicas": 2})
    assert (settings.replica().cores, settings.replica(beside=4).cores) == (6, 2)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": ["a", "a"]}, r"models\[0\] and models\[1\] are both served as 'a'; give each"),
        ({"model": ["a", "b"], "served_model_name": "c"}, "are both served as 'c'"),
        ({"models": '[{"replicas": 0}]'}, r"models\[0\]: --replicas is 0; expected at least 1"),
        ({"models": '[{}, {"port": 1}]'}, r"models\[1\]: port is no setting of a model; .* model,"),
        ({"models": "{"}, r"--models is '\{'; expected JSON .* such as \[\{\"model\": "),
        ({"models": "[{}]", "model": ["a", "b"]}, "--model is 'a,b', and --models is given too"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(given)


def test_what_is_decided_about_a_model_stays_with_it() -> None:
    settings = load({"model": ["a", "b"]}).decided([{"model": "/a"}, {"model": "/b"}])
    assert [one.model for one in settings.each()] == ["/a", "/b"]
    assert ServeSettings.model_validate(settings.model_dump(mode="json")) == settings
