"""Errors about wrong values name what the user wrote, and say what is expected."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from tests.support.wrong_values import ENV, URL, answered, errors

KEY = "KVROUTE_API_KEY"


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["replay", "--example", "--replicas", "0"], "--replicas is '0'; expected at least 1"),
        (["replay", "--example", "--load", "inf"], "--load is inf; expected at most 1,000,000"),
        (["replay", "--example", "--policy", ""], "--policy names ''; expected all or some"),
        (["replay", "/no/file"], "TRACE is '/no/file', which cannot be read (No such file"),
        (["scale", "abc"], "REPLICAS is 'abc'; expected a valid integer"),
        (["serve", "--engine", "nope"], "--engine is 'nope'; expected one of 'vllm', 'simulated'"),
        (["serve", "--engine-args", "{bad"], "--engine-args is '{bad'; expected JSON"),
        (["serve", "--attach", "a b", "--attach", "c"], "--attach is 'a b', 'c'; expected http"),
        (["serve", "--cluster", "a/b"], "--cluster is 'a/b'; expected 1 to 100 letters"),
        (["attach", "nope"], "URL is 'nope'; expected http://HOST:PORT"),
        (["status", "--url", "http://"], "(or the variable KVROUTE_URL) is 'http://'; expected"),
        (["status", "--url", "a:99999"], "(or the variable KVROUTE_URL) is 'a:99999'; expected"),
        (["batch", "run", "a", "-o", ""], "--output is '.'; expected the path of a file"),
    ],
)
def test_a_wrong_value_is_named_with_its_option_and_what_is_expected(
    command: list[str], message: str
) -> None:
    assert message in errors(*command)


def test_options_for_a_batchs_own_cluster_need_closed_quotes(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "x"}}')
    command = ("batch", "run", str(file), "-o", str(tmp_path / "out"), "--serve", "--port '")
    assert "which is not a list of options (No closing quotation)" in errors(*command)


@pytest.mark.parametrize(
    ("status", "content"),
    [
        (200, b"<html>"),
        (404, b"<html>"),
        (404, b'{"detail": "Not Found"}'),
        (404, b'{"error": {"message": "Not Found"}}'),
    ],
)
def test_another_server_is_not_taken_for_a_cluster(
    monkeypatch: pytest.MonkeyPatch, status: int, content: bytes
) -> None:
    answered(monkeypatch, status, content)
    shown = errors("status")
    assert f"no kvroute answers at {URL} (the response to GET /v1/cluster is {status}" in shown


@pytest.mark.parametrize("content", [b"<html>", b"[]", b'{"status": "ok"}'])
def test_the_doctor_does_not_take_another_server_for_a_cluster(
    monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    def get(url: str, **_: Any) -> httpx.Response:
        return httpx.Response(200, content=content, request=httpx.Request("GET", url))

    monkeypatch.setattr("kvroute.doctor.collect.httpx.get", get)
    assert "GET /health is 200 OK, without the state of a cluster)" in errors("doctor")


def test_a_key_with_a_line_break_inside_is_no_key() -> None:
    assert f"{KEY} is not an API key" in errors("status", **{KEY: "a\nb"})


@pytest.mark.parametrize(("server", "heading"), [(None, "node "), ("http://a:1", "node, or")])
def test_status_speaks_of_your_servers_only_if_some_are_attached(
    monkeypatch: pytest.MonkeyPatch, server: str | None, heading: str
) -> None:
    replica = {
        "id": "r0",
        "model": "m",
        "node": "192.0.2.1",
        "server": server,
        "blocks": 0,
        "capacity_blocks": 9,
        "running": 0,
        "waiting": 0,
        "degraded": "",
        "tool_parser": None,
        "reasoning_parser": None,
    }
    cluster = {"queues": [], "replicas": [replica]}
    answered(monkeypatch, 200, json.dumps(cluster).encode())
    shown = CliRunner().invoke(app, ["status"], env=ENV).output
    assert heading in shown
    assert ("your server" in shown) == (server is not None)
