"""What is lost while a cluster starts costs no start: attached servers, routers and replicas."""

import signal
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import psutil

from kvroute.local.embedded_redis import REDIS_SERVER
from kvroute.local.ports import free_port
from tests.support.fake_vllm import NAME, fake_servers
from tests.support.redis_server import redis_server
from tests.support.serving import READY, Cluster, assert_gone, doctor, findings, launched
from tests.support.waiting import wait_until


def test_a_cluster_starts_without_the_servers_that_are_lost_and_takes_them_later() -> None:
    with fake_servers(3) as (up, silent, down):
        up.start()
        silent.start()
        silent.freeze()
        servers = [option for server in (up, silent, down) for option in ("--attach", server.url)]
        with launched(*servers) as cluster:
            cluster.wait_for(READY)
            for lost in (silent, down):
                assert f"your server {lost.url} does not answer" in cluster.output()
            assert ready(cluster) == 1
            checks = findings(doctor(cluster, "--json"))
            wrong = [check for check in checks if check.grade == "wrong"]
            assert [(check.name, check.remedy) for check in wrong] == [("servers", "start it")] * 2
            silent.start("other")
            down.start()
            wait_until(lambda: ready(cluster) == 2)
            cluster.wait_for(f"your server {down.url} answers")
            cluster.wait_for(f"your server {silent.url} serves other")
            up.kill()
            wait_until(lambda: ready(cluster) == 1)
            body = {"model": NAME, "prompt": "Hello", "max_tokens": 1}
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
            assert answer.json()["model"] == NAME
            assert cluster.stop() == 0


def ready(cluster: Cluster) -> int:
    return int(health(cluster)["replicas"])


def health(cluster: Cluster) -> Any:
    return httpx.get(f"{cluster.url}/health", timeout=30).json()


def test_a_router_and_a_replica_that_die_during_the_start_are_started_again() -> None:
    with fake_servers(1) as (server,):
        server.start()
        with launched("--attach", server.url) as cluster:
            cluster.wait_for("starting Ray")
            server.kill()  # so the replica waits, and the start lasts until the server is back
            cluster.wait_for("router 1 of 1 is ready")
            for kind in ("kvroute:Router", "kvroute:Replica"):
                (killed,) = cluster.titled(kind)
                killed.kill()
                wait_until(partial(is_replaced, cluster, kind, killed))
            server.start()
            cluster.wait_for(READY)
            assert cluster.stop() == 0


def is_replaced(cluster: Cluster, kind: str, killed: psutil.Process) -> bool:
    return bool({*cluster.titled(kind)} - {killed})


def test_a_cluster_starts_without_its_redis_and_uses_it_when_it_answers(tmp_path: Path) -> None:
    port = free_port()
    options = ["--engine", "simulated", "--replicas", "1"]
    with launched(*options, "--redis-url", f"redis://127.0.0.1:{port}") as cluster:
        cluster.wait_for(READY)
        assert "WARNING: --redis-url is" in cluster.output()
        with redis_server(port, tmp_path):
            wait_until(lambda: health(cluster)["index"]["reachable"])
        assert cluster.stop() == 0


def test_a_start_that_is_killed_by_two_signals_leaves_no_folder_with_a_password() -> None:
    with launched("--engine", "simulated") as cluster:
        cluster.wait_for("starting Ray")
        (redis,) = cluster.named(REDIS_SERVER)
        folder = Path(redis.cwd())
        for _ in range(2):
            cluster.process.send_signal(signal.SIGINT)
        cluster.process.wait(60)
        assert_gone(cluster)
        assert not folder.exists()
