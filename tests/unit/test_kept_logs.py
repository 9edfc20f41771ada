"""The logs of the last run are kept, and a start shows what it waits for."""

import io
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from kvroute.local import progress
from kvroute.local.launch import keep_logs, kept_logs, logs_in
from kvroute.local.progress import StartProgress
from kvroute.local.ray_cluster import awaited
from kvroute.settings.serve import load


@pytest.fixture
def printed() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def shown(printed: io.StringIO) -> StartProgress:
    return StartProgress(Console(file=printed, width=200))


def run_of(folder: Path, text: str) -> Path:
    """Make the logs of a run, and return their folder."""
    session = folder / "session_1"
    (session / "logs" / "serve").mkdir(parents=True)
    (session / "logs" / "serve" / "replica.log").write_text(text)
    (folder / "session_latest").symlink_to(session)
    return logs_in(folder)


def test_the_logs_of_the_last_run_replace_those_of_the_run_before(
    tmp_path: Path, shown: StartProgress, printed: io.StringIO
) -> None:
    kept = kept_logs(load({"cluster": "production", "log_dir": str(tmp_path / "kept")}))
    assert kept == tmp_path / "kept" / "kvroute-logs-production"
    for text in ("first", "second"):
        assert keep_logs(run_of(tmp_path / text, text), kept, shown)
        assert (kept / "serve" / "replica.log").read_text() == text
    assert stat.S_IMODE(kept.stat().st_mode) == 0o700
    assert printed.getvalue() == 2 * f"logs of this run: {kept}\n"


def test_logs_that_cannot_be_moved_stay_where_they_are(
    tmp_path: Path, shown: StartProgress, printed: io.StringIO
) -> None:
    (tmp_path / "file").touch()
    logs = run_of(tmp_path / "run", "text")
    assert not keep_logs(logs, tmp_path / "file" / "kept", shown)
    assert (logs / "serve" / "replica.log").exists()
    assert f"stay in {logs}" in printed.getvalue()


def test_a_run_without_logs_leaves_those_of_the_run_before(
    tmp_path: Path, shown: StartProgress
) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    assert keep_logs(logs_in(tmp_path / "none"), kept, shown)
    assert kept.exists()


def test_clusters_of_one_machine_keep_their_logs_apart(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    folders = {kept_logs(load({"port": port})) for port in (8000, 8001)}
    assert len(folders) == 2
    assert {folder.parent for folder in folders} == {tmp_path / "kvroute"}


def test_without_a_terminal_a_long_wait_is_mentioned_again(
    monkeypatch: pytest.MonkeyPatch, shown: StartProgress, printed: io.StringIO
) -> None:
    monkeypatch.setattr(progress, "REMIND_S", 0.0)
    with shown.waiting("Ray") as update:
        update("2 of 2 replicas")
    assert "still waiting for 2 of 2 replicas, for 0 s" in printed.getvalue()


def test_a_terminal_shows_what_a_start_waits_for_and_for_how_long(printed: io.StringIO) -> None:
    console = Console(file=printed, width=80, force_terminal=True)
    with StartProgress(console).waiting("Ray") as update:
        update("1 of 2 replicas")
    assert "waiting for" in printed.getvalue()
    assert "0:00:00" in printed.getvalue()


def test_what_a_start_waits_for_is_named_by_kind_and_model() -> None:
    deployments = {
        "Replica:big": SimpleNamespace(replica_states={"STARTING": 2}),
        "Replica:small": SimpleNamespace(replica_states={"RUNNING": 1, "STARTING": 1}),
        "Router": SimpleNamespace(replica_states={"RUNNING": 1}),
    }
    assert awaited(deployments) == (
        "2 of 2 replicas of big, which load the model; "
        "1 of 2 replicas of small, which load the model"
    )
