"""The command `kvroute prefixes`, and who may use the routes behind it."""

import json
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.features.prefixes import prefixes_command
from kvroute.features.prefixes.prefix_routes import routes as prefix_routes
from kvroute.router.middleware.caller_check import roles_for
from tests.support.routes import routes

WIDTH = 80
URL = "http://127.0.0.1:8000"
ADD = ("prefixes", "add", "x", "--prompt", "a")


def shown(*command: str, width: int = WIDTH) -> str:
    result = CliRunner().invoke(app, command, env={"COLUMNS": str(width), "KVROUTE_URL": URL})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.output


@pytest.mark.parametrize("name", ["9bbumjjb", "a-name-of-" + 9 * "ten-chars-"])
@pytest.mark.parametrize("models", [1, 2])
def test_the_list_is_whole_at_80_columns(
    monkeypatch: pytest.MonkeyPatch, name: str, models: int
) -> None:
    prefix = {
        "id": name,
        "version": 1,
        "tokens": 120_421,
        "warm_on": ["a"],
        "assigned_to": ["a"],
        "pinned": "host",
        "shared": True,
        "hits": 1_000_000,
        "tokens_saved": 123_456_789,
    }
    declared = [prefix | {"model": f"{name}-{number}"} for number in range(models)]
    monkeypatch.setattr(prefixes_command, "call", lambda *_, **__: {"data": declared})
    text = shown("prefixes", "list")
    assert {name, "120,421", "123,456,789", "tokens", "version"} <= {*text.split()}
    assert "…" not in text
    assert (f"{name}-1" in text) is (models == 2)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ((*ADD[:-1], ""), "--prompt is empty; expected the text"),
        ((*ADD, "--ttl-s", "inf"), "--ttl-s is inf; expected"),
        ((*ADD, "--host", "--unpinned"), "--host pins the prefix, and --unpinned does not"),
        (("prefixes", "rm", ""), "ID is ''; expected the name of a prefix"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_is_expected(
    command: tuple[str, ...], message: str
) -> None:
    assert message in shown(*command, width=300)


@pytest.mark.parametrize(
    ("field", "said", "expected"),
    [
        ("replicas", "replicas is 0;", "--replicas is 0;"),
        ("ttl_s", "ttl_s is -1;", "--ttl-s is -1;"),
        ("id", 'id is "";', 'ID is "";'),
    ],
)
def test_an_error_of_the_cluster_names_the_commands_option(
    monkeypatch: pytest.MonkeyPatch, field: str, said: str, expected: str
) -> None:
    error = {"error": {"message": said, "param": field, "code": "invalid_value"}}

    def request(method: str, url: str, **_: Any) -> httpx.Response:
        content = json.dumps(error).encode()
        return httpx.Response(400, content=content, request=httpx.Request(method, url))

    monkeypatch.setattr("kvroute.client.httpx.request", request)
    assert shown(*ADD, width=300).startswith(expected)


def test_operators_change_prefixes_and_observers_read_them() -> None:
    own = routes([prefix_routes])
    roles = {f"{method} {path}": roles_for(method, path) for method, path in own}
    observing = roles_for("GET", "/v1/cluster")
    managing = roles_for("POST", "/v1/load_lora_adapter")
    assert roles == {
        "GET /v1/prefixes": observing,
        "GET /v1/prefixes/{name:path}": observing,
        "POST /v1/prefixes": managing,
        "DELETE /v1/prefixes/{name:path}": managing,
    }
