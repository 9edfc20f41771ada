"""`kvroute batch run` ends at once if it cannot do what it is asked for."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.command import batches_command
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


@pytest.mark.parametrize("failed", [0, 2])
def test_a_batch_with_failed_lines_says_how_to_find_out_why(
    monkeypatch: pytest.MonkeyPatch, failed: int
) -> None:
    usage = {"input_tokens": 0, "output_tokens": 0, "input_tokens_details": {"cached_tokens": 0}}
    found = {
        "id": "batch_1",
        "status": "completed",
        "usage": usage,
        "errors": None,
        "request_counts": {"total": 3, "completed": 3 - failed, "failed": failed},
        **dict.fromkeys(("input_file_id", "output_file_id", "error_file_id"), "file-1"),
        **dict.fromkeys(("created_at", "expires_at"), 0),
    }
    monkeypatch.setattr(batches_command, "call", lambda *_, **__: found)
    shown = CliRunner().invoke(app, ["batch", "show", "batch_1", *NOWHERE]).output
    assert ("kvroute batch results batch_1 --errors -o" in shown) == bool(failed)
