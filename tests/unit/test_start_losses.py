"""Routers and replicas that end during the start are counted, and named."""

from pathlib import Path
from typing import Any

import pytest

from kvroute.local.start_losses import ATTEMPTS, StartLosses
from kvroute.machine.problem import StartError


def details(*pids: int, wanted: int = 1) -> dict[str, Any]:
    replicas = [
        {"replica_id": f"r{pid}", "pid": pid, "log_file_path": f"/serve/replica_r{pid}.log"}
        for pid in pids
    ]
    return {"Router": {"replicas": replicas, "target_num_replicas": wanted}}


def test_a_start_survives_some_losses_and_names_the_last_one(tmp_path: Path) -> None:
    losses = StartLosses(tmp_path)
    losses.update(details(1))
    losses.update(details(2))
    losses.update(details())
    losses.update(details(3))
    log = tmp_path / "serve/replica_r2.log"
    assert [*losses.last()] == [f"router r2 (process 2) has ended; its log is {log}"]


def test_after_many_losses_a_start_ends_with_name_signal_and_log(tmp_path: Path) -> None:
    (tmp_path / f"worker-ab-01-{ATTEMPTS}.err").write_text(
        "x\nFatal Python error: Segmentation fault\n\nThread 0x1\n"
    )
    losses = StartLosses(tmp_path)
    for pid in range(1, ATTEMPTS + 1):
        losses.update(details(pid))
    with pytest.raises(
        StartError, match=r"3 routers ended .* router r3 \(process 3\) .*Segmentation fault.* log"
    ):
        losses.update(details(9))


def test_a_large_deployment_may_lose_more(tmp_path: Path) -> None:
    losses = StartLosses(tmp_path)
    for pid in range(2 * ATTEMPTS):
        losses.update(details(pid, wanted=2))
    with pytest.raises(StartError):
        losses.update(details(9, wanted=2))
