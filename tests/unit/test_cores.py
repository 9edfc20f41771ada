"""Engines claim CPU cores by lock files that no other user can prepare or hold."""

import os
import tempfile
from pathlib import Path

import pytest

from kvroute.replica.vllm_engine.process.cpu_affinity import Cores, claim_cores


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))  # nothing needs it
    return tmp_path


def release(cores: Cores) -> None:
    assert cores._lock
    cores._lock.close()


def test_an_engine_gets_cores_that_no_other_one_has() -> None:
    count = len(os.sched_getaffinity(0))
    claimed = [claim_cores(1) for _ in range(count)]
    assert len({cores.numbers for cores in claimed}) == count
    assert not claim_cores(1).numbers
    for cores in claimed:
        release(cores)
    again = claim_cores(1)
    assert len(again) == 1
    release(again)


def test_a_lock_that_is_a_link_changes_no_file_and_stops_no_engine(
    state: Path, caplog: pytest.LogCaptureFixture
) -> None:
    release(claim_cores(1))
    victim = state / "victim"
    victim.write_text("content")
    for lock in (state / "kvroute/cores").iterdir():
        lock.unlink()
        lock.symlink_to(victim)
    assert not claim_cores(1).numbers
    assert victim.read_text() == "content"
    assert "set XDG_STATE_HOME to a folder that can be written" in caplog.text
