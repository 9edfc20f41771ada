"""`kvroute attach` is one process in front of servers that somebody else runs; it needs no Ray."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import pytest

from tests.support.gated_server import FIRST, gated_server
from tests.support.scripted_model import NAME, SUMMARY, ScriptedServer, scripted_servers
from tests.support.serving import ATTACH, KVROUTE, Cluster, launched, start_cluster
from tests.support.waiting import wait_until

RESPONSES = "/v1/responses"
ASKED = {"model": NAME, "input": "Work."}


@pytest.fixture(scope="module")
def servers() -> Iterator[list[ScriptedServer]]:
    with (
        TemporaryDirectory() as folder,
        scripted_servers(2, turns=3, folder=Path(folder)) as running,
    ):
        yield running


@pytest.fixture(scope="module")
def listed() -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        yield Path(folder) / "servers.txt"


@pytest.fixture(scope="module")
def gateway(servers: list[ScriptedServer], listed: Path) -> Iterator[Cluster]:
    listed.write_text("\n".join(server.url for server in servers))
    with start_cluster("--attach-file", str(listed), command=ATTACH) as running:
        yield running


def replicas(gateway: Cluster) -> int:
    return int(httpx.get(f"{gateway.url}/health", timeout=10).json()["replicas"])


def said(gateway: Cluster, **more: Any) -> str:
    answer = httpx.post(f"{gateway.url}{RESPONSES}", json={**ASKED, **more}, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.text


def test_both_servers_answer(gateway: Cluster) -> None:
    wait_until(lambda: replicas(gateway) == 2)
    used = set[str]()
    for number in range(20):
        url, headers = f"{gateway.url}{RESPONSES}", {"x-request-id": f"own-{number}"}
        asked = {**ASKED, "input": f"{number} " * 99}
        answer = httpx.post(url, json=asked, headers=headers, timeout=60)
        assert SUMMARY in answer.text
        assert answer.headers.get_list("x-request-id") == [f"own-{number}"]
        used.add(answer.headers["x-kvroute-replica"])
    assert len(used) == 2
    assert "event: response.completed" in said(gateway, stream=True)
    assert len(httpx.get(f"{gateway.url}/v1/models", timeout=60).headers["x-request-id"]) == 32


def test_a_server_that_ends_costs_no_request_and_is_used_again(
    gateway: Cluster, servers: list[ScriptedServer]
) -> None:
    wait_until(lambda: replicas(gateway) == 2)
    servers[0].kill()
    assert all(SUMMARY in said(gateway, input=f"{number}") for number in range(10))
    wait_until(lambda: replicas(gateway) == 1)
    servers[0].start()
    wait_until(lambda: replicas(gateway) == 2)


def test_each_server_has_metrics_of_its_own(gateway: Cluster) -> None:
    wait_until(lambda: replicas(gateway) == 2)
    targets = httpx.get(f"{gateway.url}/v1/metrics/targets", timeout=60).json()
    addresses = {
        target["labels"]["replica"]: target["targets"][0]
        for target in targets
        if "replica" in target["labels"]
    }
    of_servers = {
        replica: httpx.get(f"http://{address}/metrics", timeout=60).text
        for replica, address in addresses.items()
    }
    assert len(of_servers) == 2
    for text in of_servers.values():
        assert "kvroute_engine_requests_total" in text
        assert "kvroute_connected_replicas" not in text


def test_the_doctor_examines_it(gateway: Cluster) -> None:
    wait_until(lambda: replicas(gateway) == 2)
    command = [*KVROUTE, "doctor", "--url", gateway.url]
    report = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    assert "versions" in report
    assert "cannot be read" not in report


def test_it_can_be_stopped_before_a_server_is_ready(servers: list[ScriptedServer]) -> None:
    with launched(servers[0].url, command=ATTACH) as starting:
        starting.wait_for("Redis")
        assert starting.stop() == 0


def test_a_signal_whose_exception_was_lost_stops_it_too(servers: list[ScriptedServer]) -> None:
    """Native code that a signal interrupts may drop the exception of the signal's handler."""
    program = """
import os, signal, sys
from kvroute.cli import main
from kvroute.gateway import start_gateway
is_local_only = start_gateway.is_local_only
def interrupted(settings):
    try:
        os.kill(os.getpid(), signal.SIGINT)
    except BaseException:
        return is_local_only(settings)
start_gateway.is_local_only = interrupted
main()
"""
    command = (sys.executable, "-c", program, "attach")
    with launched(servers[0].url, command=command) as starting:
        assert starting.process.wait(60) == 0


def test_a_restart_keeps_what_was_stored(servers: list[ScriptedServer], tmp_path: Path) -> None:
    options = (servers[1].url, "--state-dir", str(tmp_path), "--response-store-mb", "9")
    with start_cluster(*options, command=ATTACH) as first:
        answer = httpx.post(f"{first.url}{RESPONSES}", json={**ASKED, "store": True}, timeout=60)
    with start_cluster(*options, command=ATTACH) as second:
        url = f"{second.url}{RESPONSES}/{answer.json()['id']}"
        assert httpx.get(url, timeout=60).json()["output"] == answer.json()["output"]


def test_the_file_of_servers_is_followed(
    gateway: Cluster, servers: list[ScriptedServer], listed: Path
) -> None:
    wait_until(lambda: replicas(gateway) == 2)
    listed.write_text(servers[1].url)
    wait_until(lambda: replicas(gateway) == 1)
    assert SUMMARY in said(gateway)
    listed.write_text("\n".join(server.url for server in servers))
    wait_until(lambda: replicas(gateway) == 2)
    assert SUMMARY in said(gateway)


def test_streams_end_whole_when_their_server_is_removed_and_when_kvroute_stops(
    servers: list[ScriptedServer], tmp_path: Path
) -> None:
    listed = tmp_path / "servers.txt"
    with gated_server() as gated:
        listed.write_text(gated.url)
        with start_cluster("--attach-file", str(listed), command=ATTACH) as gateway:
            with streamed(gateway) as rest:
                listed.write_text(servers[1].url)
                wait_until(lambda: other_servers_answer(gateway))
                gated.ends.set()
                assert "response.completed" in "".join(rest)
            gated.ends.clear()
            listed.write_text(gated.url)
            wait_until(lambda: not other_servers_answer(gateway) and replicas(gateway) == 1)
            with streamed(gateway) as rest:
                gateway.process.send_signal(signal.SIGTERM)
                wait_until(lambda: accepts_nothing(gateway))
                gated.ends.set()
                assert "response.completed" in "".join(rest)


def accepts_nothing(gateway: Cluster) -> bool:
    """Return whether the gateway refuses new requests, or new connections."""
    try:
        return httpx.get(f"{gateway.url}/health", timeout=10).status_code == 503
    except httpx.TransportError:
        return True


@contextmanager
def streamed(gateway: Cluster) -> Iterator[Iterator[str]]:
    """Begin a stream; yield the rest of its lines."""
    with httpx.stream(
        "POST", f"{gateway.url}{RESPONSES}", json={**ASKED, "stream": True}, timeout=60
    ) as response:
        lines = response.iter_lines()
        assert any(FIRST in line for line in lines)
        yield lines


def other_servers_answer(gateway: Cluster) -> bool:
    """Return whether a request is answered at once, which the gated server does not do."""
    try:
        return httpx.post(f"{gateway.url}{RESPONSES}", json=ASKED, timeout=1).status_code == 200
    except httpx.TimeoutException:
        return False


@pytest.mark.parametrize("options", [("--own-replicas", "1"), ("--routers", "2"), ("--wire-tls",)])
def test_what_needs_a_cluster_says_so(options: tuple[str, ...]) -> None:
    with launched("http://127.0.0.1:9", *options, command=ATTACH) as refused:
        assert refused.process.wait(60) == 1
        assert options[0] in refused.output()
