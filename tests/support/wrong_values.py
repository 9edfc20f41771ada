"""Commands that fail, because of a wrong value or because of what the cluster answers."""

from typing import Any

import httpx
import pytest
from typer.testing import CliRunner

from kvroute.cli import app

URL = "http://127.0.0.1:8000"
ENV = {"COLUMNS": "300", "KVROUTE_URL": URL}


def errors(*command: str, **env: str) -> str:
    """Return what a command prints that must fail without a traceback."""
    failed = CliRunner().invoke(app, [*command], env=ENV | env)
    assert isinstance(failed.exception, SystemExit), failed.exception
    assert failed.exit_code in (1, 2)
    return failed.output


def answered(monkeypatch: pytest.MonkeyPatch, status: int, content: bytes) -> None:
    """Let all requests of commands have this response."""

    def request(method: str, url: str, **_: Any) -> httpx.Response:
        return httpx.Response(status, content=content, request=httpx.Request(method, url))

    monkeypatch.setattr("kvroute.client.httpx.request", request)
