"""A cluster that is slow to stop is killed, and the exit code of kvroute serve is not 0."""

import threading

import pytest
import ray
from ray import serve

from kvroute.local import ray_cluster


@pytest.mark.parametrize("is_slow", [False, True])
def test_ray_is_not_shut_down_under_a_thread_that_still_waits_for_serve(
    is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray would end the whole process, with exit code 1."""
    released, calls = threading.Event(), list[str]()
    monkeypatch.setattr(ray_cluster, "SHUTDOWN_S", 0.05)
    monkeypatch.setattr(ray, "is_initialized", lambda: True)
    monkeypatch.setattr(serve, "shutdown", lambda: released.wait(10) if is_slow else None)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("ray"))
    ray_cluster._stop()
    released.set()
    assert calls == ([] if is_slow else ["ray"])
