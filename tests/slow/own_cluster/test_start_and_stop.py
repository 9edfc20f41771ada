"""A start that cannot succeed says why, and a stop leaves no process, whenever it comes."""

import signal
import time
from collections.abc import Sequence
from contextlib import suppress

import httpx
import psutil
import pytest

from kvroute.local.haproxy import standin as haproxy_standin
from kvroute.local.haproxy.standin import MIN_S, SUFFIX
from kvroute.local.head_service import DAEMON, HEAD_SERVICE
from kvroute.local.ports import listen_error
from tests.support.serving import (
    READY,
    START_S,
    Cluster,
    assert_gone,
    launched,
    name_of,
    start_cluster,
)
from tests.support.waiting import wait_until


def test_a_start_that_fails_says_why_and_leaves_no_process() -> None:
    with launched("--model", "/nowhere") as cluster:
        assert cluster.process.wait(START_S) == 1
        assert "model is '/nowhere', and there is no such folder" in cluster.output()
        assert_gone(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_leaves_no_process(number: signal.Signals) -> None:
    with launched("--engine", "simulated") as cluster:
        cluster.wait_for("starting Ray")
        assert cluster.stop(number) == 0


@pytest.mark.parametrize("needed", [HEAD_SERVICE, DAEMON])
def test_a_cluster_without_ray_says_so_and_ends_all_that_it_started(needed: str) -> None:
    with launched("--engine", "simulated", "--replicas", "1") as cluster:
        cluster.wait_for(READY)
        (process,) = (process for process in cluster.processes() if name_of(process) == needed)
        process.kill()
        assert cluster.process.wait(START_S) == 1
        assert f"{needed} has ended" in cluster.output()
        assert_gone(cluster)
        assert listen_error("127.0.0.1", int(cluster.url.rpartition(":")[2])) is None, "the port"


def test_another_haproxy_stands_in_for_a_killed_one_until_serve_has_replaced_that() -> None:
    with start_cluster("--engine", "simulated", "--replicas", "1") as cluster:
        wait_until(lambda: has_run_long(cluster))
        for haproxy in (killed := cluster.named("haproxy")):
            haproxy.kill()  # after a reload there are two for a while
        statuses, deadline = list[int](), time.monotonic() + START_S
        while not is_replaced(cluster, killed):
            assert time.monotonic() < deadline
            with suppress(httpx.TransportError):  # as another takes over
                statuses.append(httpx.get(f"{cluster.url}/health", timeout=5).status_code)
        assert len(statuses) > 1
        wait_until(lambda: is_healthy(cluster))
        assert {*statuses} == {200}


def is_healthy(cluster: Cluster) -> bool:
    with suppress(httpx.TransportError):  # the new HAProxy does not listen yet
        return httpx.get(f"{cluster.url}/health", timeout=5).status_code == httpx.codes.OK
    return False


def has_run_long(cluster: Cluster) -> bool:
    """Whether no HAProxy has started just now: for one that ends so soon none stands in."""
    if cluster.named("kvroute-haproxy"):
        return False  # it becomes one
    beside = [
        process for process in cluster.processes() if haproxy_standin.__name__ in words_of(process)
    ]
    youngest_s = min((time.time() - each.create_time() for each in beside), default=0.0)
    return youngest_s > 2 * MIN_S


def is_replaced(cluster: Cluster, killed: Sequence[psutil.Process]) -> bool:
    running = [each for each in cluster.named("haproxy") if each not in killed]
    return bool(running) and not any(map(is_stand_in, running))


def is_stand_in(process: psutil.Process) -> bool:
    return any(word.endswith(SUFFIX) for word in words_of(process))


def words_of(process: psutil.Process) -> list[str]:
    """Of its command; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []
