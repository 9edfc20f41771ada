"""A start goes on while Ray Serve replaces what has ended, and without lost attached servers."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve

from kvroute.deployments import APPLICATION
from kvroute.local import ray_cluster
from kvroute.local.progress import StartProgress
from kvroute.machine.problem import StartError
from kvroute.process import ray_internals

Deploy = Callable[..., None]


class Signals:
    def sleep(self, seconds: float) -> None: ...


@pytest.fixture
def deploy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Deploy:
    """Return how to run deploy() while Serve reports these statuses, one after the other."""

    def run(*statuses: Any, lost: Mapping[str, int] | None = None, within_s: float = 60) -> None:
        reported: Iterator[Any] = iter(statuses)

        def status() -> Any:
            return SimpleNamespace(applications={APPLICATION: next(reported)})

        monkeypatch.setattr(serve, "run_many", lambda *_, **__: None)
        monkeypatch.setattr(serve, "status", status)
        monkeypatch.setattr(ray_internals, "deployments", lambda _: {})
        signals: Any = Signals()
        progress = StartProgress()
        ray_cluster.deploy(
            *(None, progress, signals, time.monotonic() + within_s),
            ray_cluster.LostProcesses(tmp_path, progress),
            not_awaited=lambda: lost or {},
        )

    return run


def application(status: str, *, starting: Sequence[str] = (), message: str = "") -> Any:
    """Return the status of an application with a router and two replicas."""
    states = {
        "Router": {"STARTING": 1} if "Router" in starting else {"RUNNING": 1},
        "Replica": {"RUNNING": 1, "STARTING": 1} if "Replica" in starting else {"RUNNING": 2},
    }
    return SimpleNamespace(
        status=status,
        message="",
        deployments={
            name: SimpleNamespace(replica_states=state, message=message)
            for name, state in states.items()
        },
    )


def test_a_router_that_is_replaced_does_not_end_the_start(deploy: Deploy) -> None:
    deploy(
        application("DEPLOYING", starting=["Replica"]),
        application("UNHEALTHY", starting=["Router", "Replica"], message="health check failed"),
        application("RUNNING"),
    )


def test_what_serve_gives_up_ends_the_start(deploy: Deploy) -> None:
    with pytest.raises(StartError, match="ValueError: no such file"):
        deploy(application("DEPLOY_FAILED", message="ValueError: no such file"))


def test_a_start_waits_for_no_replica_of_a_lost_server(deploy: Deploy) -> None:
    waiting = application("DEPLOYING", starting=["Replica"])
    deploy(waiting, lost={"Replica": 1})
    with pytest.raises(StartError, match="not ready in time"):
        deploy(waiting, lost={"Replica": 0}, within_s=0)
    with pytest.raises(StopIteration):  # it waits for the next status
        deploy(waiting, lost={"Replica": 0})
    with pytest.raises(StopIteration):
        deploy(application("DEPLOYING", starting=["Router", "Replica"]), lost={"Replica": 1})
