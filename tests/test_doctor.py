"""The doctor says what is wrong with a cluster, what to do, and nothing of what is well."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
from openai import OpenAI

from router.command.ports import free_port
from router.doctor import checks, clocks, ports, work
from router.doctor.checks import Check
from router.doctor.clocks import Offset
from router.doctor.examination import examine
from router.doctor.ports import Probe
from router.routing.ledger import CAUSES
from tests.redis_server import redis_server
from tests.serving import Cluster, doctor, start_cluster
from tests.test_audit import NO_DRIFT
from tests.workloads import ask, user

REDIS = {
    "version": "7.2.4",
    "maxmemory_policy": "noeviction",
    "maxmemory_bytes": 0,
    "used_bytes": 5_000_000,
    "answers_in_s": 0.001,
    "clock_ahead_s": [-0.001, 0.001],
}
SERVE = {"haproxy": True, "came_through_haproxy": True, "throughput_optimized": True}
CANARY = {
    "id": "a",
    "answered_s": 0.01,
    "seen_s": 0.01,
    "blocks": {"expected": 3, "redis": 3, "mirror": 3},
    "cause": None,
    "detail": "",
}
SLOW = {"redis", "leases"}  # late, and a warning of it, on a computer with too much to do
ODD = """
import os
from router.command import ray_cluster
from router.cli import main
from router.settings import ServeSettings

told, prepare = ServeSettings.router, ray_cluster._prepare_environment

def without_haproxy(folder):
    prepare(folder)
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"

ServeSettings.router = lambda self: told(self).model_copy(update={"revision": "another"})
ray_cluster._prepare_environment = without_haproxy
main()
"""  # routers that are told another revision than replicas, behind Serve's own proxy


def of_redis(**facts: Any) -> Check:
    (check,) = checks.redis(REDIS | facts)
    return check


def test_a_redis_that_keeps_what_it_is_told_is_well() -> None:
    assert of_redis().grade == "ok"
    assert of_redis(maxmemory_bytes=10_000_000).grade == "ok"


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl", "volatile-lru"])
def test_a_redis_that_may_evict_is_wrong(policy: str) -> None:
    check = of_redis(maxmemory_policy=policy)
    assert check.grade == "wrong"
    assert policy in check.finding
    assert "noeviction" in check.remedy


def test_a_redis_that_is_too_old_or_away_is_wrong() -> None:
    assert of_redis(version="6.0.16").grade == "wrong"
    assert of_redis(version="6.2.0").grade == "ok"
    (away,) = checks.redis({"error": "Connection refused"})
    assert (away.grade, away.finding) == ("wrong", "Redis is away: Connection refused")


def test_a_redis_that_is_nearly_full_or_slow_is_a_warning() -> None:
    assert of_redis(maxmemory_bytes=5_100_000).grade == "warning"
    assert of_redis(answers_in_s=0.2).grade == "warning"


def test_a_replica_that_runs_without_a_lease_is_wrong_and_a_late_one_a_warning() -> None:
    (well,) = checks.leases(["a", "b"], {"a": 2.9, "b": 2.1})
    (missing,) = checks.leases(["a", "b"], {"a": 2.9})
    (late,) = checks.leases(["a"], {"a": 2.9, "b": 0.2})
    assert (well.grade, missing.grade, late.grade) == ("ok", "wrong", "warning")
    assert "replica b" in missing.finding
    assert "replica b" in late.finding
    assert list(checks.leases(["a"], None)) == []


def test_requests_that_do_not_come_through_haproxy_are_a_warning() -> None:
    assert checks.haproxy(SERVE).grade == "ok"
    off = checks.haproxy(SERVE | {"haproxy": False, "came_through_haproxy": False})
    assert "RAY_SERVE_ENABLE_HA_PROXY=1" in off.remedy
    assert checks.haproxy(SERVE | {"came_through_haproxy": False}).grade == "warning"
    assert checks.haproxy(SERVE | {"throughput_optimized": False}).grade == "warning"


def test_a_deployment_that_serve_cannot_bring_up_is_wrong_in_serves_words() -> None:
    well = {"status": "HEALTHY", "message": "", "replicas": {"RUNNING": 2}}
    ill = {"status": "UNHEALTHY", "message": "No GPU.", "replicas": {"RUNNING": 1, "STARTING": 1}}
    assert [check.grade for check in checks.deployments({"Replica": well})] == ["ok"]
    (check,) = checks.deployments({"Router": well, "Replica": ill})
    assert check.grade == "wrong"
    assert check.finding == "Replica is UNHEALTHY: 1 running, 1 starting. No GPU."
    (moving,) = checks.deployments({"Replica": ill | {"status": "UPSCALING"}})
    assert moving.grade == "warning"
    assert [check.grade for check in checks.deployments(None)] == ["wrong"]


def test_a_replica_with_another_tokenizer_is_wrong() -> None:
    (well,) = checks.handshake({"replicas": 2})
    (wrong,) = checks.handshake({"replicas": 2, "degraded": {"a": "its tokenizer is another one"}})
    assert (well.grade, wrong.grade) == ("ok", "wrong")
    assert wrong.finding == "replica a: its tokenizer is another one"


def of_hits(requests: int = 100, **tokens: int) -> list[Check]:
    ledger = dict.fromkeys(CAUSES, 0) | tokens
    return [*work.hits({"window_s": 300, "requests": requests, "tokens": ledger})]


@pytest.mark.parametrize("cause", work.LIMITS)
def test_a_cause_that_costs_many_hits_is_a_warning_with_its_share(cause: str) -> None:
    (check,) = of_hits(hit=60, new=10, **{cause: 30})
    assert (check.name, check.grade) == ("hits", "warning")
    assert check.finding.startswith(f"{cause}: 30% of the prompts' tokens")
    assert check.remedy


def test_few_misses_are_told_largest_first_and_are_well() -> None:
    (check,) = of_hits(hit=700, surprise=50, new=160, spilled=90)
    assert check.grade == "ok"
    assert check.finding == (
        "75% of prompt tokens from a cache, new 16%, spilled 9%, of 1,000 in 5 minutes"
    )


def test_a_few_requests_say_nothing() -> None:
    (check,) = of_hits(requests=3, stale=100)
    assert check.grade == "ok"


def test_one_replica_with_a_long_queue_is_named_and_a_full_fleet_is_said() -> None:
    (one,) = work.load({"a": 30.0, "b": 0.5, "c": 0.0})
    assert (one.grade, "replica a has 30 s" in one.finding) == ("warning", True)
    (full,) = work.load({"a": 30.0, "b": 20.0, "c": 10.0})
    assert (full.grade, "more replicas" in full.remedy) == ("warning", True)
    (well,) = work.load({"a": 0.5, "b": 0.0})
    assert well.grade == "ok"


def test_another_version_of_the_command_is_a_warning() -> None:
    cluster = {"kvroute": "0.1.0", "ray": "2.60.0"}
    assert checks.versions(cluster, "0.1.0", ["10.0.0.1"]).grade == "ok"
    assert checks.versions(cluster, "0.2.0", None).grade == "warning"


def test_canaries_that_were_seen_are_one_line_and_lost_ones_one_each() -> None:
    lost = CANARY | {"id": "b", "cause": "nothing published", "seen_s": None}
    lost["blocks"] = {"expected": 3, "redis": 0, "mirror": 0}
    seen, wrong = checks.canary([CANARY, lost, CANARY], "r1")
    assert seen.grade == "ok"
    assert "by 2 replicas" in seen.finding
    assert (wrong.name, wrong.grade) == ("canary of b", "wrong")
    assert wrong.finding == "nothing published; of 3 blocks 0 in Redis, 0 in the router"
    assert wrong.remedy


def test_a_canary_where_caching_is_off_is_well() -> None:
    (check,) = checks.canary([CANARY | {"cause": "caching is off"}], "r1")
    assert check.grade == "ok"


def test_a_clock_is_wrong_only_when_it_is_so_for_sure() -> None:
    here = Offset(-0.1, 0.1)
    assert [check.grade for check in clocks.judge(here, here, {"replica a": here})] == ["ok"]
    slow_answer = Offset(-3.0, 3.0)
    assert [check.grade for check in clocks.judge(here, None, {"a": slow_answer})] == ["ok"]
    (check,) = clocks.judge(here, None, {"replica a": Offset(4.0, 4.2)})
    assert (check.grade, check.finding) == ("wrong", "replica a is 3.9 s ahead of the router")
    (check,) = clocks.judge(here, Offset(-9.1, -9.0), {})
    assert (check.grade, check.finding) == ("wrong", "Redis is 9.0 s behind the router")


def test_a_wrong_clock_of_this_computer_is_not_the_clusters_fault() -> None:
    ahead = Offset(7.0, 7.1)
    (check,) = clocks.judge(ahead, None, {"replica a": Offset(6.8, 7.9)})
    assert (check.grade, check.finding) == ("warning", "the router is 7.0 s ahead of this computer")


def test_a_date_header_tells_a_clock_to_the_second() -> None:
    sent = clocks.dated(
        "Sat, 21 Nov 2026 14:00:00 GMT", sent_s=1795269600.2, received_s=1795269600.4
    )
    assert sent is not None
    assert sent == pytest.approx((-0.4, 0.8), abs=1e-6)
    assert clocks.dated(None, sent_s=0, received_s=1) is None


def test_one_port_that_is_closed_is_wrong_and_all_of_them_is_our_place_in_the_network() -> None:
    well, closed = Probe("replica a", "10.0.0.1:1"), Probe("replica b", "10.0.0.2:1", "refused")
    assert [check.grade for check in ports.judge([well, well])] == ["ok"]
    (one,) = ports.judge([well, closed])
    assert (one.grade, one.finding) == ("wrong", "replica b at 10.0.0.2:1: refused")
    assert [check.grade for check in ports.judge([closed, closed])] == ["warning"]
    assert [check.grade for check in ports.judge([])] == ["ok"]


def test_a_port_where_nobody_listens_is_named() -> None:
    labels = {"role": "replica", "replica": "a"}
    (probe,) = ports.probes([{"targets": [f"127.0.0.1:{free_port()}"], "labels": labels}])
    assert probe.who == "replica a"
    assert "refused" in probe.trouble


def test_where_no_cluster_answers_the_doctor_says_so() -> None:
    for url in (f"http://127.0.0.1:{free_port()}", "127.0.0.1", "http://["):
        (check,) = examine(url, audit=True)
        assert check.grade == "wrong"
        assert url in check.finding


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="module")
def port() -> int:
    return free_port()


@pytest.fixture(scope="module")
def cluster(folder: Path, port: int) -> Iterator[Cluster]:
    """Small caches behind two routers, and a Redis that the last test takes away."""
    with (
        redis_server(port, folder) as url,
        start_cluster(
            *("--engine", "simulated", "--simulated-blocks", "300", "--routers", "2"),
            *("--simulated-decode-ms", "1", "--max-model-len", "4096", "--redis-url", url),
        ) as cluster,
    ):
        yield cluster


def findings(examined: subprocess.CompletedProcess[str]) -> list[Check]:
    return [Check(**check) for check in json.loads(examined.stdout)]


@pytest.mark.timeout(240)
def test_a_cluster_that_is_well_has_exit_code_0_and_nothing_to_do(cluster: Cluster) -> None:
    examined = doctor(cluster, "--json", "--audit")
    found = findings(examined)
    assert {check.name for check in found if check.grade != "ok"} <= SLOW
    assert [check for check in found if check.grade == "wrong"] == []
    assert examined.returncode == 0
    names = {check.name for check in found}
    assert names >= {"cluster", "handshake", "serve", "redis", "leases", "haproxy", "versions"}
    assert names >= {"ports", "clocks", "canary", "hits", "load"}
    (canary,) = [check for check in found if check.name == "canary"]
    assert "answered by 2 replicas" in canary.finding


@pytest.mark.timeout(240)
def test_the_table_has_lines_of_80_columns_and_no_colours_in_a_pipe(cluster: Cluster) -> None:
    shown = doctor(cluster).stdout
    assert max(map(len, shown.splitlines())) <= 80
    assert "\x1b" not in shown


@pytest.mark.timeout(240)
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
    pages = (httpx.get(f"http://{each['targets'][0]}/metrics", timeout=10).text for each in targets)
    return {
        line
        for page in pages
        for line in page.splitlines()
        if line.startswith("kvroute_") and re.search(r"(requests|tokens)_total", line)
    }


@pytest.mark.timeout(240)
def test_canaries_count_as_nobodys_requests(cluster: Cluster) -> None:
    before = counted(cluster)
    assert any("kvroute_engine_requests_total" in line for line in before)
    assert doctor(cluster).returncode == 0
    assert counted(cluster) == before


def audit(cluster: Cluster) -> list[dict[str, Any]]:
    answer = httpx.get(f"{cluster.url}/v1/cluster/audit", timeout=60).raise_for_status()
    return list(answer.json()["replicas"])


@pytest.mark.timeout(240)
def test_a_cluster_under_load_and_evictions_has_no_drift(cluster: Cluster, client: OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, client, user(f"{i % 40} " * 400)) for i in range(150)]
        while not all(each.done() for each in asking):
            assert [replica["drift"] for replica in audit(cluster)] == [NO_DRIFT, NO_DRIFT]
        replicas = {each.result().replica for each in asking}
    found = {replica["id"]: replica["blocks"] for replica in audit(cluster)}
    assert found.keys() == replicas
    for blocks in found.values():
        assert blocks["engine"] == blocks["replica"] == blocks["redis"] == blocks["mirror"] > 100


@pytest.mark.timeout(240)
def test_a_wrong_set_in_redis_is_found_until_it_has_healed(
    cluster: Cluster, client: OpenAI, port: int
) -> None:
    replica = ask(client, user("some blocks " * 100)).replica
    assert doctor(cluster, "--audit").returncode == 0
    with redis.Redis(port=port) as store:
        (key,) = store.keys(f"kvroute:*:blocks:{replica}:*")
        store.srem(key, store.srandmember(key))
        store.sadd(key, b"surplus!")
    found = doctor(cluster, "--audit", "--json")
    (wrong,) = [check for check in findings(found) if check.grade == "wrong"]
    assert found.returncode == 1
    assert replica in wrong.name
    assert "drift of 2 in Redis" in wrong.finding
    deadline = time.monotonic() + 20
    while doctor(cluster, "--audit").returncode != 0:
        assert time.monotonic() < deadline


@pytest.mark.timeout(240)
def test_replicas_that_hash_otherwise_are_named_and_a_cluster_without_haproxy_too() -> None:
    with start_cluster(
        "--engine", "simulated", command=(sys.executable, "-c", ODD, "serve")
    ) as cluster:
        examined = doctor(cluster, "--json")
        shown = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()
    found = findings(examined)
    lost = [check for check in found if check.name.startswith("canary of")]
    assert "haproxy" in {check.name for check in found if check.grade == "warning"}
    assert examined.returncode == 1
    assert {check.name for check in lost} == {
        f"canary of {replica['id']}" for replica in shown["replicas"]
    }
    assert all(check.finding.startswith("other fingerprints; of 3 blocks 0") for check in lost)


@pytest.mark.timeout(240)
def test_a_redis_that_is_away_is_said_and_the_rest_is_examined(cluster: Cluster, port: int) -> None:
    """The last one: this Redis does not come back."""
    with redis.Redis(port=port) as store:
        store.shutdown(nosave=True)
    examined = doctor(cluster, "--json", "--audit")
    found = {check.name: check for check in findings(examined)}
    assert examined.returncode == 1
    assert "Traceback" not in examined.stderr
    assert found["redis"].finding.startswith("Redis is away: ")
    assert found["audit"].finding.startswith("Redis is away")
    assert [check.grade for check in found.values()].count("ok") >= 4
    assert found["canary"].finding.startswith("answered by 2 replicas; without Redis")
