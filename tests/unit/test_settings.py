"""Where a setting comes from, and what is said when it cannot be used."""

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command

from kvroute.cli import app
from kvroute.contract.adapters import Adapter
from kvroute.local.launch import cluster_id
from kvroute.settings import checked_options
from kvroute.settings.help import SettingsError, env_names, flags
from kvroute.settings.model_settings import Detected, ModelSettings
from kvroute.settings.options.replica import ReplicaOptions
from kvroute.settings.options.router import RouterOptions
from kvroute.settings.replica import ReplicaSettings
from kvroute.settings.router import RouterSettings
from kvroute.settings.serve import ServeSettings, load
from tests.support.repository import ROOT, product_modules


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


def test_a_cluster_without_a_name_is_called_default_where_serve_deploys_it() -> None:
    for given, name in (({}, "default"), ({"cluster": "mine"}, "mine")):
        (settings,) = load({"redis_url": "redis://r", **given}).resolve()
        assert settings.cluster == name


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


def test_an_empty_environment_variable_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
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
    with pytest.raises(SettingsError, match="replica is not a setting; the settings are model, "):
        load({"replica": 2})


def test_every_setting_has_a_flag_and_a_help_text_that_names_its_variable() -> None:
    offered = {param.name: param for param in serve_command().params}
    wrong = []
    for name, field in ServeSettings.model_fields.items():
        parameter, wanted = offered[name], set("/".join(flags(name, field)).split("/"))
        if {*parameter.opts, *parameter.secondary_opts} != wanted:
            wrong.append(f"{name}: flags {parameter.opts}, not {wanted}")
        if f"KVROUTE_{name.upper()}" not in str(vars(parameter)["help"]):
            wrong.append(f"{name}: no variable in its help")
    assert wrong == []


def only(**given: Any) -> ModelSettings:
    """What the cluster's one model is served with."""
    (settings,) = load({"redis_url": "redis://r", **given}).resolve()
    return settings


def test_blocks_are_larger_on_cpus() -> None:
    assert only().block_size == 32
    assert only(gpus_per_replica=1).block_size == 16


def test_options_that_a_user_omits_depend_on_the_machine() -> None:
    (settings,) = load({"model": "~/m"}).resolve(
        [Detected("/home/m", gpus_per_replica=2)], redis_url="redis://r", cluster="host-8000"
    )
    assert (settings.model, settings.served_model_name) == ("/home/m", "~/m")
    assert (settings.tensor_parallel_size, settings.block_size) == (2, 16)
    assert (settings.redis_url, settings.cluster) == ("redis://r", "host-8000")


def test_ranks_share_the_gpus_of_their_replica() -> None:
    of_ranks = only(gpus_per_replica=8, data_parallel_size=4)
    assert (of_ranks.gpus_per_replica, of_ranks.tensor_parallel_size) == (8, 2)
    on_cpus = only(data_parallel_size=4)
    assert (on_cpus.gpus_per_replica, on_cpus.tensor_parallel_size) == (0, 1)
    received = ReplicaSettings.model_validate(of_ranks.for_replicas())
    assert (received.data_parallel_size, received.tensor_parallel_size) == (4, 2)


@pytest.mark.parametrize(("gpus", "such_as"), [(6, 4), (3, 4), (9, 8)])
def test_gpus_that_cannot_be_shared_are_refused(gpus: int, such_as: int) -> None:
    with pytest.raises(
        SettingsError, match=f"-replica is {gpus} .* is 4; expected .*, such as {such_as}$"
    ):
        load({"gpus_per_replica": gpus, "data_parallel_size": 4})


def test_a_users_cluster_id_wins_and_serve_deploy_has_a_default_one() -> None:
    assert only(cluster="blue").cluster == "blue"
    assert only().cluster == "default"


def test_an_id_from_a_host_and_a_port_is_one_that_a_user_may_give() -> None:
    given = cluster_id("host name.example", 8000)
    assert only(cluster=given).cluster == "host-name.example-8000"


def test_every_option_reaches_just_the_processes_that_it_is_defined_for() -> None:
    settings, replicas, routers = only(), ReplicaOptions.model_fields, RouterOptions.model_fields
    options = {*replicas, *routers}
    assert options & settings.for_replicas().keys() == replicas.keys()
    assert options & settings.for_routers().keys() == routers.keys()


def test_every_option_is_used() -> None:
    """Somewhere outside its definition and its description."""
    defined = ROOT / "kvroute" / "settings" / "options"
    files = [file for file in product_modules() if not file.is_relative_to(defined)]
    used = {*re.findall(r"\w+", "".join(file.read_text() for file in files))}
    assert [name for name in ServeSettings.model_fields if name not in used] == []


def test_a_processs_part_is_the_same_after_its_way_through_json() -> None:
    settings = only(engine_args={"seed": 1}, request_log="/logs", dtype="float16")
    for kind, part in (
        (ReplicaSettings, settings.for_replicas()),
        (RouterSettings, settings.for_routers()),
    ):
        received = kind.model_validate(json.loads(json.dumps(part)))
        assert all(getattr(received, each) == getattr(settings, each) for each in part)


def test_another_option_for_routers_starts_no_replica_anew() -> None:
    assert only(max_body_mb=99, policy="random").for_replicas() == only().for_replicas()


def test_an_adapter_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[str]()

    def read_adapter(given: str, *, has_files: bool) -> Adapter:
        read.append(given)
        return Adapter(name="a", path="/a")

    monkeypatch.setattr(checked_options, "read_adapter", read_adapter)
    settings = only(lora=["a=/a"])
    ReplicaSettings.model_validate(settings.for_replicas())
    RouterSettings.model_validate(settings.for_routers())
    assert read == ["a=/a"]


def test_adding_an_engine_option_is_one_edit() -> None:
    """Its definition gives the flag, the variable, the row of the table and the replica's value."""
    shown = subprocess.run(
        [sys.executable, "-m", "tests.support.new_option"],
        env=os.environ | {"KVROUTE_LOOKAHEAD": "5"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert shown.split() == ["5", "9", "False", "True", "True"]


def test_models_that_are_only_named_have_everything_in_common(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KVROUTE_MODEL", "a, b")
    for settings in (load({"replicas": 3}), load({"replicas": 3, "model": ["a", "b"]})):
        assert [(one.model, one.replicas) for one in settings.per_model] == [("a", 3), ("b", 3)]


def test_each_of_several_models_may_have_settings_of_its_own() -> None:
    models = '[{"model": "a", "served_model_name": "fast", "block_size": 64}, {"replicas": 1}]'
    common = {"pin_share": 0.1, "redis_url": "redis://r", "drain_timeout_s": 30.0}
    first, second = load({"models": models, **common}).resolve()
    assert (first.drain_timeout_s, second.drain_timeout_s) == (30.0, 30.0)
    assert (first.served_model_name, first.model, first.replicas) == ("fast", "a", 2)
    assert (second.served_model_name, second.replicas) == ("SmolLM2-135M-Instruct", 1)
    assert (first.block_size, second.block_size) == (64, 32)
    assert first.pin_share == second.pin_share == 0.1


def test_models_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 12)
    models = [{"model": "a"}, {"model": "b", "replicas": 4}]
    together = load({"redis_url": "redis://r", "replicas": 2, "models": models}).resolve()
    assert only(replicas=2).cores == 6
    assert [one.cores for one in together] == [2, 2]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"model": ["a", "a"]},
            r"models\[0\] and models\[1\] are both served as 'a'; set a different",
        ),
        ({"model": ["a", "b"], "served_model_name": "c"}, "are both served as 'c'"),
        ({"models": '[{"replicas": 0}]'}, r"models\[0\]: --replicas is 0; expected at least 1"),
        (
            {"models": '[{}, {"port": 1}]'},
            r"models\[1\]: port cannot be set for one model; .* model,",
        ),
        ({"models": "{"}, r"--models is '\{'; expected JSON .* such as \[\{\"model\": "),
        ({"models": "[{}]", "model": ["a", "b"]}, "--model is 'a,b', and --models is set as well"),
        ({"models": "[{}]", "model": "a"}, "--model is 'a', and --models is set as well"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(
    given: dict[str, object], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load(given)


def test_detected_facts_are_used_for_the_right_model() -> None:
    settings = load({"model": ["a", "b"], "redis_url": "redis://r"})
    each = settings.resolve([Detected("/a", 0), Detected("/b", 1)])
    assert [(one.served_model_name, one.model) for one in each] == [("a", "/a"), ("b", "/b")]
    assert [one.gpus_per_replica for one in each] == [0, 1]


def test_settings_cannot_be_resolved_without_a_redis_url() -> None:
    with pytest.raises(SettingsError, match="redis_url is missing; set a URL, such as redis://"):
        load({}).resolve()
