"""`kvroute batch run` ends at once if it cannot do what it is asked for."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.local.ports import free_port

NOWHERE = ("--url", "http://127.0.0.1:9")
LINE = json.dumps(
    {"custom_id": "a", "url": "/v1/completions", "body": {"model": "m", "prompt": "x"}}
)


def test_an_output_that_is_the_input_is_refused_and_not_touched(tmp_path: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(LINE)
    done = CliRunner().invoke(
        app, ["batch", "run", str(file), "-o", f"{tmp_path}/./in.jsonl", *NOWHERE]
    )
    assert done.exit_code == 1
    assert "FILE and --output are both" in done.output
    assert file.read_text() == LINE


def test_an_address_where_nothing_answers_is_named(tmp_path: Path) -> None:
    file, url = tmp_path / "in.jsonl", f"127.0.0.1:{free_port()}"
    file.write_text(LINE)
    done = CliRunner().invoke(
        app, ["batch", "run", str(file), "-o", str(tmp_path / "out"), "--url", url]
    )
    assert done.exit_code == 1
    assert f"no kvroute answers at http://{url}" in done.output


def test_lines_are_not_sent_to_another_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text(LINE)
    monkeypatch.setattr("kvroute.command.batch_command.httpx.get", not_found)
    done = CliRunner().invoke(
        app, ["batch", "run", str(file), "-o", str(tmp_path / "out"), *NOWHERE]
    )
    assert done.exit_code == 1
    assert f"no kvroute answers at {NOWHERE[1]} (the response to GET /health is 404)" in done.output


def not_found(url: str, **_: Any) -> httpx.Response:
    return httpx.Response(404, request=httpx.Request("GET", url))
