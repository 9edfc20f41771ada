"""`kvroute doctor` finds nothing wrong with a cluster to which nothing has happened yet."""

import re

import httpx
import pytest
import redis

from tests.support.redis_server import Wired
from tests.support.serving import Cluster, doctor, findings

SLOW = {"redis", "leases"}  # late, and a warning of it, on a computer with too much to do


@pytest.fixture
def cluster(wired: Wired) -> Cluster:
    return wired.cluster


@pytest.fixture
def port(wired: Wired) -> int:
    """Where Redis listens."""
    return wired.port


def test_a_cluster_that_is_well_has_exit_code_0_and_nothing_to_do(cluster: Cluster) -> None:
    examined = doctor(cluster, "--json", "--audit")
    found = findings(examined)
    assert {check.name for check in found if check.grade != "ok"} <= SLOW
    assert [check for check in found if check.grade == "wrong"] == []
    assert examined.returncode == 0
    names = {check.name for check in found}
    assert names >= {"cluster", "handshake", "serve", "redis", "leases", "haproxy", "versions"}
    assert names >= {"ports", "clocks", "canary", "hits", "load", "queue"}
    (canary,) = [check for check in found if check.name == "canary"]
    assert "answered by 3 replicas" in canary.finding


def test_the_table_has_lines_of_80_columns_and_no_colours_in_a_pipe(cluster: Cluster) -> None:
    shown = doctor(cluster).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


def test_a_redis_that_evicts_is_found_and_named(cluster: Cluster, port: int) -> None:
    with redis.Redis(port=port) as store:
        store.config_set("maxmemory-policy", "allkeys-lru")
        try:
            examined = doctor(cluster, "--json")
        finally:
            store.config_set("maxmemory-policy", "noeviction")
    (wrong,) = [check for check in findings(examined) if check.grade == "wrong"]
    assert examined.returncode == 1
    assert "allkeys-lru" in wrong.finding


def counted(cluster: Cluster) -> set[str]:
    """All series of all processes that count what users asked for."""
    targets = httpx.get(f"{cluster.url}/v1/metrics/targets", timeout=10).json()
    pages = (
        httpx.get(f"http://{target['targets'][0]}/metrics", timeout=10).text for target in targets
    )
    return {
        line
        for page in pages
        for line in page.splitlines()
        if line.startswith("kvroute_") and re.search(r"(requests|tokens)_total", line)
    }


def test_canaries_count_as_nobodys_requests(cluster: Cluster) -> None:
    before = counted(cluster)
    assert any("kvroute_engine_requests_total" in line for line in before)
    assert doctor(cluster).returncode == 0
    assert counted(cluster) == before
