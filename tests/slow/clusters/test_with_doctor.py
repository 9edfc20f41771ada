"""`kvroute doctor` finds what is wrong with a cluster to which much has happened."""

import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import redis
from openai import OpenAI

from tests.support.records import NO_DRIFT
from tests.support.redis_server import Wired
from tests.support.serving import Cluster, doctor, findings, start_cluster
from tests.support.waiting import wait_until
from tests.support.workloads import ask, user

ODD = """
import os
from kvroute.local import ray_cluster
from kvroute.cli import main
from kvroute.settings.model_settings import ModelSettings

told, prepare = ModelSettings.for_routers, ray_cluster._prepare_environment

def without_haproxy(settings, folder):
    prepare(settings, folder)
    os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "0"

ModelSettings.for_routers = lambda self: told(self) | {"revision": "another"}
ray_cluster._prepare_environment = without_haproxy
main()
"""  # routers that are told another revision than replicas, behind Serve's own proxy


@pytest.fixture
def cluster(wired: Wired) -> Cluster:
    return wired.cluster


@pytest.fixture
def port(wired: Wired) -> int:
    """Where Redis listens."""
    return wired.port


def audit(cluster: Cluster) -> list[dict[str, Any]]:
    answer = httpx.get(f"{cluster.url}/v1/cluster/audit", timeout=60).raise_for_status()
    return list(answer.json()["replicas"])


def drifts(cluster: Cluster) -> set[int | None]:
    """Of all accounts; None where one could not be compared."""
    return {drift for replica in audit(cluster) for drift in replica["drift"].values()}


def test_a_cluster_under_load_and_evictions_has_no_drift(cluster: Cluster, client: OpenAI) -> None:
    with ThreadPoolExecutor(8) as pool:
        asking = [pool.submit(ask, client, user(f"{i} " * 400)) for i in range(150)]
        while not all(each.done() for each in asking):
            assert drifts(cluster) <= {0, None}, "on a busy machine leases may end for a moment"
        replicas = {each.result().replica for each in asking}
    wait_until(lambda: [replica["drift"] for replica in audit(cluster)] == [NO_DRIFT] * 3)
    found = {replica["id"]: replica["blocks"] for replica in audit(cluster)}
    assert found.keys() == replicas
    for blocks in found.values():
        assert blocks["engine"] == blocks["replica"] == blocks["redis"] == blocks["mirror"] > 100


def test_a_wrong_set_in_redis_is_found_until_it_has_healed(
    cluster: Cluster, client: OpenAI, port: int
) -> None:
    replica = ask(client, user("some blocks " * 100)).replica
    assert doctor(cluster, "--audit").returncode == 0
    with redis.Redis(port=port) as store:
        (key,) = store.keys(f"kvroute:*:blocks:{replica}:*")
        store.srem(key, store.srandmember(key))  # the engine may evict that one right now
        store.sadd(key, b"surplus!")  # as many as before: else the next write would heal it
    found = doctor(cluster, "--audit", "--json")
    (wrong,) = [check for check in findings(found) if check.grade == "wrong"]
    assert found.returncode == 1
    assert replica in wrong.name
    assert re.search("drift of [12] in Redis", wrong.finding), wrong.finding
    wait_until(lambda: doctor(cluster, "--audit").returncode == 0)


def test_rubbish_in_redis_stops_no_request_and_is_named(
    cluster: Cluster, client: OpenAI, port: int
) -> None:
    with redis.Redis(port=port) as store:
        (key,) = store.keys("kvroute:*:replicas")
        prefix = key.decode().removesuffix(":replicas")
        store.sadd(key, "stranger")
        record = {"incarnation": "1", "seq": "0", "facts": '{"block_size": 1}', "load": "{}"}
        store.hset(f"{prefix}:replica:stranger", mapping=record | {"pins": "{}"})
        store.xadd(f"{prefix}:changes", {"r": "stranger", "a": "garbage"})
        store.publish(f"{prefix}:routers", b"garbage")
        before = ask(client, user("all is well"))
        time.sleep(2)  # both routers have read it
        assert ask(client, user("all is well")).text == before.text
        found = findings(doctor(cluster, "--json"))
        store.srem(key, "stranger")
        store.delete(f"{prefix}:replica:stranger")
    named = " ".join(check.finding for check in found if check.name == "records")
    assert "replica 'stranger' of" in named
    assert 'message "on the routers\' channel" of' in named
    assert "the field b'i' is missing" in named
    assert [check for check in found if check.grade == "wrong"] == []


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


def test_a_redis_that_is_away_is_said_and_the_rest_is_examined(
    cluster: Cluster, wired: Wired
) -> None:
    """The last one: this Redis does not come back."""
    wired.server.close()
    examined = doctor(cluster, "--json", "--audit")
    found = {check.name: check for check in findings(examined)}
    assert examined.returncode == 1
    assert "Traceback" not in examined.stderr
    assert found["redis"].finding.startswith("Redis is away or refuses writes: ")
    assert found["audit"].finding.startswith("Redis is away")
    assert [check.grade for check in found.values()].count("ok") >= 4
    assert found["canary"].finding.startswith("answered by 3 replicas; without Redis")
