"""`kvroute tenants` prints each tenant's usage, as a table and for programs."""

import csv
import json
from io import StringIO
from typing import Any

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.features.keys.accounting import tenants_command
from kvroute.features.keys.accounting.accounts import as_json

USED = {"ok": 3, "refused": 1, "failed": 2, "hit": 1500, "new": 500, "output_tokens": 60}
TIMES = {"prefill_us": 1_500_000, "decode_us": 1_000_000_000, "saved_us": 4_250_000}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Replace the cluster's answer, and return the query that the command sends."""
    accounts = [
        as_json("acme", USED | TIMES) | {"model": "m"},
        as_json("idle", {"refused": 1}) | {"model": "m"},
    ]
    answer = {"object": "list", "since": "2026-11-01", "until": "2026-11-23", "data": accounts}
    served: dict[str, Any] = {"answer": answer}

    def call(method: str, url: str, path: str, *, params: dict[str, str]) -> Any:
        served["query"] = (method, path, params)
        return answer

    monkeypatch.setattr(tenants_command, "call", call)
    return served


def printed(*options: str) -> str:
    result = CliRunner().invoke(app, ["tenants", *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_table_has_sums_and_shares(served: dict[str, Any]) -> None:
    *head, first, second, _period = printed().splitlines()
    assert "model" not in "".join(head)
    assert first.split() == ["acme", "4", "2,000", "75.0%", "60", "1,001.5", "4.2"]
    assert second.split()[:4] == ["idle", "1", "0", "0.0%"]
    assert "2026-11-01 to 2026-11-23" in printed()


def test_each_model_has_its_own_rows(served: dict[str, Any]) -> None:
    served["answer"]["data"].append(as_json("acme", {"ok": 1}) | {"model": "n"})
    assert "model" in printed()


def test_json_and_csv_have_all_figures(served: dict[str, Any]) -> None:
    assert json.loads(printed("--format", "json")) == served["answer"]
    rows = [*csv.DictReader(StringIO(printed("--format", "csv")))]
    assert rows[0] == {
        "model": "m",
        "tenant": "acme",
        "requests": "4",
        "failed": "2",
        "prompt_tokens": "2000",
        "cached": "0.75",
        "output_tokens": "60",
        "gpu_seconds": "1001.5",
        "gpu_seconds_saved": "4.25",
    }


def test_the_options_are_sent_as_the_query(served: dict[str, Any]) -> None:
    printed("--since", "2026-11-01", "--model", "m")
    params = {"since": "2026-11-01", "model": "m"}
    assert served["query"] == ("GET", "/v1/cluster/tenants", params)
