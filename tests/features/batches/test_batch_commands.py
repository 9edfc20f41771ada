"""What the commands for batches inside a cluster print."""

import pytest
from typer.testing import CliRunner

from kvroute.cli import app
from kvroute.features.batches import batch_commands

NOWHERE = ("--url", "http://127.0.0.1:9")


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
    monkeypatch.setattr(batch_commands, "call", lambda *_, **__: found)
    shown = CliRunner().invoke(app, ["batch", "show", "batch_1", *NOWHERE]).output
    assert ("kvroute batch results batch_1 --errors -o" in shown) == bool(failed)


@pytest.mark.parametrize(("command", "value"), [("show", ""), ("cancel", "../a")])
def test_an_id_that_no_batch_can_have_is_refused(command: str, value: str) -> None:
    done = CliRunner().invoke(app, ["batch", command, value, *NOWHERE])
    assert done.exit_code == 1
    assert f"BATCH is {value!r}; expected the id of a batch" in done.output
