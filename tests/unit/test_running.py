"""Commands find the cluster: by --url, by KVROUTE_URL, or because it runs on this machine."""

import json
import shlex
import socket
from collections.abc import Iterator
from inspect import signature
from pathlib import Path

import httpx
import pytest
from typer import Typer
from typer.testing import CliRunner

from kvroute import client
from kvroute.cli import app
from kvroute.client import LOCAL, find_url
from kvroute.command import doctor_command
from kvroute.doctor.checks import Check
from kvroute.features import FEATURES
from kvroute.features.feature import Feature
from kvroute.local.launch import first_steps
from kvroute.local.running import registered, running_urls
from kvroute.process.state_folder import state_folder
from kvroute.settings.serve import load


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("KVROUTE_URL", raising=False)
    return tmp_path / "kvroute" / "clusters"


def test_a_cluster_is_listed_while_it_runs(folder: Path) -> None:
    assert running_urls() == []
    with registered("http://127.0.0.1:8123"):
        assert running_urls() == ["http://127.0.0.1:8123"]
    assert running_urls() == []
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("change", [{"started_s": 0.0}, {"pid": 2**22 + 1}])
def test_a_cluster_that_was_killed_is_not_listed(folder: Path, change: dict[str, float]) -> None:
    with registered("http://127.0.0.1:8123"):
        (file,) = folder.iterdir()
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
        assert running_urls() == []
        assert not file.exists()


def test_a_cluster_of_another_machine_and_a_damaged_file_are_not_listed(folder: Path) -> None:
    folder.mkdir(parents=True)
    host = socket.gethostname()
    (folder / "another-machine-1.json").write_text("{}")
    (folder / f"{host}-1.json").write_text("{")
    assert running_urls() == []


@pytest.mark.parametrize("fault", ["not a folder", "not readable", "no home folder"])
def test_a_folder_that_cannot_be_used_stops_neither_a_cluster_nor_a_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: str
) -> None:
    (tmp_path / "file").touch()
    states = {
        "not a folder": str(tmp_path / "file"),
        "not readable": str(tmp_path / ("long" * 100)),  # an error for all users, also for root
        "no home folder": "~nobody-has-this-name",
    }
    monkeypatch.setenv("XDG_STATE_HOME", states[fault])
    with registered("http://127.0.0.1:8123"):
        assert running_urls() == []
        assert find_url("") == LOCAL


def test_a_check_before_a_start_looks_for_no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "running_urls", lambda: pytest.fail("it has looked"))
    monkeypatch.setattr(doctor_command, "_machine_checks", lambda options: [Check("a", "ok", "b")])
    result = CliRunner().invoke(app, ["doctor", "--before-start"])
    assert (result.exit_code, "everything is ok" in result.output) == (0, True)


def test_without_the_variable_the_folder_is_in_the_home_folder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("XDG_STATE_HOME")
    assert state_folder() == Path.home() / ".local/state/kvroute"


def test_a_given_url_comes_before_a_running_cluster_and_that_before_the_default() -> None:
    assert find_url("") == LOCAL
    with registered("http://127.0.0.1:8123"):
        assert find_url("") == "http://127.0.0.1:8123"
        assert find_url("http://elsewhere:1/") == "http://elsewhere:1"
        assert find_url("elsewhere:1") == "http://elsewhere:1"


def asking(feature: Feature) -> Iterator[str]:
    """Yield the commands of a feature that ask a cluster: one of each group."""
    for name, command in feature.commands().items():
        if not isinstance(command, Typer):
            yield name
        elif any(
            each.name == "list" and each.callback and "url" in signature(each.callback).parameters
            for each in command.registered_commands
        ):
            yield f"{name} list"


@pytest.mark.parametrize(
    "words",
    [
        *("status", "doctor", "explain Hello", "scale 2"),
        *(words for feature in FEATURES for words in asking(feature)),
    ],
)
@pytest.mark.parametrize("how", ["variable", "running"])
def test_every_command_finds_the_cluster(
    monkeypatch: pytest.MonkeyPatch, words: str, how: str
) -> None:
    asked = []

    def refuse(*arguments: object, **_: object) -> httpx.Response:
        asked.append(str(arguments[-1]))
        raise httpx.ConnectError("refused")

    monkeypatch.setattr(httpx, "request", refuse)
    monkeypatch.setattr(httpx, "get", refuse)
    url = f"http://127.0.0.1:{8123 if how == 'variable' else 8124}"
    with registered("http://127.0.0.1:8124"):
        env = {"KVROUTE_URL": url} if how == "variable" else {}
        result = CliRunner().invoke(app, words.split(), env=env)
    assert result.exit_code == 1
    assert asked
    assert all(address.startswith(f"{url}/") for address in asked)


def test_with_two_clusters_a_command_wants_the_url() -> None:
    with registered("http://127.0.0.1:8123"):
        other = state_folder() / "clusters"
        (file,) = other.iterdir()
        copied = file.read_text().replace("8123", "8124")
        file.with_stem(f"{file.stem}0").write_text(copied)
        result = CliRunner().invoke(app, ["status"])
    assert result.exit_code == 1
    assert "http://127.0.0.1:8123, http://127.0.0.1:8124; choose one with --url" in result.output


def test_the_first_steps_work_with_any_port() -> None:
    url = "http://127.0.0.1:8123"
    lines = [*first_steps(url, "it's", load({"port": 8123}))]
    assert f"  export KVROUTE_URL={url}" in lines
    (curl,) = (shlex.split(line)[1:] for line in lines if "curl" in line)
    assert curl[:2] == ["curl", f"{url}/v1/chat/completions"]
    body = json.loads(curl[-1])
    assert (body["model"], body["max_tokens"]) == ("it's", 40)
    assert "authorization" not in "".join(lines)


def test_the_first_steps_have_the_key(tmp_path: Path) -> None:
    settings = load({"api_keys": str(tmp_path / "keys.json")})
    lines = [*first_steps(LOCAL, "m", settings)]
    assert any(line.startswith("  export KVROUTE_API_KEY=") for line in lines)
    (curl,) = (line for line in lines if "curl" in line)
    assert '-H "authorization: Bearer $KVROUTE_API_KEY"' in curl
