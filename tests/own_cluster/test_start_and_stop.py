"""A start that cannot succeed says why, and a stop leaves no process, whenever it comes."""

import signal
import time
from contextlib import suppress

import httpx
import pytest

from kvroute.local.head_service import HEAD_SERVICE
from kvroute.local.ports import why_not
from tests.support.serving import READY, assert_gone, launched, start_cluster


def test_a_start_that_fails_says_why_and_leaves_no_process() -> None:
    with launched("--model", "/nowhere") as cluster:
        assert cluster.process.wait(60) == 1
        assert "model is '/nowhere', where there is no config.json" in cluster.output()
        assert_gone(cluster)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_the_start_leaves_no_process(number: signal.Signals) -> None:
    with launched("--engine", "simulated") as cluster:
        cluster.wait_for("starting Ray", deadline_s=60)
        assert cluster.stop(number) == 0


def test_a_cluster_that_loses_rays_head_service_says_so_and_ends_all_that_it_started() -> None:
    with launched("--engine", "simulated", "--replicas", "1") as cluster:
        cluster.wait_for(READY, deadline_s=120)
        (head,) = (each for each in cluster.processes() if each.name() == HEAD_SERVICE)
        head.kill()
        assert cluster.process.wait(20) == 1
        assert f"{HEAD_SERVICE} has ended" in cluster.output()
        assert_gone(cluster)
        assert why_not("127.0.0.1", int(cluster.url.rpartition(":")[2])) is None, "the port"


def test_a_haproxy_that_is_killed_is_soon_back_and_says_nothing_wrong_meanwhile() -> None:
    with start_cluster("--engine", "simulated", "--replicas", "1") as cluster:
        for haproxy in cluster.named("haproxy"):
            haproxy.kill()  # after a reload there are two for a while
        statuses = set[int]()
        deadline = time.monotonic() + 15  # Serve's own default is 24 s
        while 200 not in statuses:
            assert time.monotonic() < deadline
            with suppress(httpx.TransportError):
                statuses.add(httpx.get(f"{cluster.url}/health", timeout=5).status_code)
        assert statuses <= {200, 503}
