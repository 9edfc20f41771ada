"""Errors of `kvroute keys` and `kvroute tenants` name what the user wrote, and what is expected."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from tests.support.wrong_values import answered, errors


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["tenants", "--format", "xml"], "--format is 'xml'; expected one of 'table', 'json'"),
        (["keys", "list", "--file", "/no/file"], "kvroute keys add makes a file"),
    ],
)
def test_a_wrong_value_is_named(command: list[str], message: str) -> None:
    assert message in errors(*command)


@pytest.mark.parametrize(
    ("value", "message"),
    [("0", " of at least 1"), ("9" * 20, " of at most 281474976710656"), ("-1", ", or none")],
)
def test_a_limit_of_a_tenant_has_a_range(tmp_path: Path, value: str, message: str) -> None:
    file = str(tmp_path / "keys")
    CliRunner().invoke(app, ["keys", "add", "--tenant", "acme", "--file", file])
    shown = errors("keys", "limit", "acme", "--file", file, "--max-requests", value)
    assert f"--max-requests is '{value}'; expected a whole number{message}" in shown


@pytest.mark.parametrize(
    ("command", "field", "said", "shown"),
    [
        ("tenants", "since", 'since is "x"; expected', '--since is "x"; expected'),
        ("tenants", "since", "since is A and until is B;", "--since is A and --until is B;"),
        ("tenants", "x", "what is since is unknown", "what is since is unknown"),
    ],
)
def test_an_error_of_the_cluster_names_the_commands_option(
    monkeypatch: pytest.MonkeyPatch, command: str, field: str, said: str, shown: str
) -> None:
    error = {"error": {"message": said, "param": field, "code": "invalid_value"}}
    answered(monkeypatch, 400, json.dumps(error).encode())
    assert errors(*command.split()).startswith(shown)
