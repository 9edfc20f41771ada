"""Prefixes that a cluster starts with: RTP-LLM's file, or the same in a variable."""

import json
from pathlib import Path
from typing import cast

import pytest

from kvroute.features.prefixes.prefix_options import (
    PrefixOptions,
    PrefixSettings,
    ReplicaPrefixSettings,
    read_tasks,
    tasks_of,
)
from kvroute.settings.help import SettingsError, env_names
from kvroute.settings.replica import ReplicaSettings
from kvroute.settings.router import RouterSettings
from kvroute.settings.serve import ServeSettings, load

TASKS = [{"task_id": 1, "prompt": "You are brief."}, {"task_id": "法律", "prompt": "你是律师。"}]


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, field in ServeSettings.model_fields.items():
        for variable in env_names(name, field):
            monkeypatch.delenv(variable, raising=False)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps(TASKS))
    return path


def named(settings: ServeSettings) -> PrefixOptions:
    """Return the settings as what they also are: the options of named prefixes."""
    return cast("PrefixOptions", settings)


def test_a_number_names_a_task_as_its_digits_do() -> None:
    assert [task.task_id for task in read_tasks(json.dumps(TASKS))] == ["1", "法律"]


def test_the_file_is_found_by_rtp_llms_name(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    monkeypatch.setenv("MULTI_TASK_PROMPT", str(file))
    assert [task.prompt for task in tasks_of(named(load({})))] == ["You are brief.", "你是律师。"]


def test_the_json_itself_does_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTI_TASK_PROMPT_STR", json.dumps(TASKS))
    settings = load({"redis_url": "redis://r"})
    (decided,) = settings.resolve()
    routers = RouterSettings.model_validate(decided.for_routers())
    assert routers.of("prefixes", PrefixSettings).tasks == tasks_of(named(settings))
    replicas = ReplicaSettings.model_validate(decided.for_replicas())
    assert replicas.in_replica("prefixes", ReplicaPrefixSettings).declared == ("1", "法律")


def test_two_sources_stop_the_start(file: Path) -> None:
    with pytest.raises(SettingsError, match="keep one of them"):
        load({"multi_task_prompt": file, "multi_task_prompt_str": "[]"})


def test_the_error_for_a_missing_file_has_its_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"--multi-task-prompt is '.*no\.json'.*No such file"):
        load({"multi_task_prompt": tmp_path / "no.json"})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{", "the value: Invalid JSON"),
        ("{}", "the value: Input should be a valid"),
        ('[{"task_id": true, "prompt": "a"}]', r"0\.task_id: Input should be a valid string"),
        ('[{"task_id": 1}]', r"0\.prompt: Field required"),
        ('[{"task_id": 1, "prompt": ""}]', r"0\.prompt: String should have at least 1"),
        (
            '[{"task_id": 1, "prompt": "a"}, {"task_id": "1", "prompt": "b"}]',
            "two tasks have the task_id '1'",
        ),
    ],
)
def test_a_bad_list_is_refused_with_the_place_and_the_format(text: str, complaint: str) -> None:
    with pytest.raises(SettingsError, match=rf'expected a list such as \[{{"task_id.*{complaint}'):
        load({"multi_task_prompt_str": text})
