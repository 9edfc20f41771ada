"""Waits until all routers and replicas of a cluster serve: before and after a test kills one.

A router is in Redis before HAProxy sends it requests, and HAProxy sends requests to a router that
was killed until it notices. A replica is in Redis before each router has a connection to it. So a
kill right after another one could hit the only router that serves.
"""

import contextlib
import csv
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil
import requests

from kvroute.local.haproxy.health import ADMIN_SOCKET
from kvroute.settings.serve import ServeSettings
from tests.support.serving import Cluster
from tests.support.waiting import wait_until

EVERY_S = 0.5  # seconds between two looks at the fleet, each of which takes 0.04 s of CPU time
WITHIN_S = 240.0  # seconds that a killed process may take to be replaced; vLLM's replicas the most


def wait_for_fleet(cluster: Cluster) -> None:
    """Wait until HAProxy sends requests to each router, and each router to each replica.

    The fleet has as many replicas and routers as the cluster's command says.
    """
    replicas, routers = (_option(cluster, name) for name in ("replicas", "routers"))
    wait_until(lambda: _is_whole(cluster, replicas, routers), within_s=WITHIN_S, every_s=EVERY_S)


def _option(cluster: Cluster, name: str) -> int:
    args = [*map(str, cluster.process.args)]  # type: ignore[arg-type]
    option = f"--{name}"
    if option in args:
        return int(args[args.index(option) + 1])
    return int(ServeSettings.model_fields[name].default)


def _is_whole(cluster: Cluster, replicas: int, routers: int) -> bool:
    with contextlib.suppress(OSError, ValueError, psutil.Error, requests.RequestException):
        addresses = _addresses(cluster)
        ports = {int(address.rpartition(":")[2]) for address in addresses}
        return (
            len(addresses) == routers
            and ports <= _ports(cluster.routers())
            and all(_serves(address, replicas, routers) for address in addresses)
        )
    return False


def _addresses(cluster: Cluster) -> list[str]:
    """Return the addresses of the routers in HAProxy's configuration; none if one is not up."""
    (admin,) = {_admin_socket(process) for process in cluster.named("haproxy")}
    with socket.socket(socket.AF_UNIX) as client:
        client.settimeout(10)
        client.connect(str(admin))
        client.sendall(b"show stat\n")
        answer = b"".join(iter(lambda: client.recv(1 << 16), b"")).decode()
    rows = csv.DictReader(answer.removeprefix("# ").splitlines())
    found = [row for row in rows if row["svname"].startswith("SERVE_REPLICA")]
    is_up = all((row["status"], row["check_status"]) == ("UP", "L7OK") for row in found)
    return [row["addr"] for row in found] if is_up else []


def _admin_socket(process: psutil.Process) -> Path:
    args = process.cmdline()
    return Path(args[args.index("-f") + 1]).with_name(ADMIN_SOCKET)


def _ports(processes: Sequence[psutil.Process]) -> set[int]:
    """Return the ports on which these processes listen."""
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


def _serves(address: str, replicas: int, routers: int) -> bool:
    """Return whether this router has the whole fleet, and nothing else."""
    health, cluster, targets = (
        requests.get(f"http://{address}{path}", timeout=10).json()
        for path in ("/health", "/v1/cluster", "/v1/metrics/targets")
    )
    pids = {replica["pid"] for replica in cluster["replicas"]}
    roles = [target["labels"]["role"] for target in targets]
    return (
        health["replicas"] == len(pids) == replicas
        and all(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)
        and roles.count("router") == routers
    )
