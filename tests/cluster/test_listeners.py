"""The processes of a cluster: where they listen, and their share of the processors."""

import contextlib
import re
from collections.abc import Iterator
from ipaddress import IPv6Address, ip_address

import psutil

from kvroute.local.ports import is_local
from tests.support.repository import ROOT
from tests.support.serving import Cluster

TABLE = re.compile(r"^\| `([^`]+)`", re.MULTILINE)  # the first column: a process's name


def listening(cluster: Cluster) -> Iterator[tuple[str, str]]:
    """Yield the name of each process that listens, as `ss` shows it, and the address."""
    command = psutil.Process(cluster.process.pid)
    started = {*cluster.processes(), command, *command.children(recursive=True)}
    for process in started:
        with contextlib.suppress(psutil.NoSuchProcess):  # for example, an earlier HAProxy
            for connection in process.net_connections("tcp"):
                if connection.status == psutil.CONN_LISTEN:
                    yield name_of(process), connection.laddr.ip


def name_of(process: psutil.Process) -> str:
    """Return the part of a process's command that says what it is."""
    command = " ".join(process.cmdline())
    if actor := re.match(r"ray::(ServeReplica:kvroute:)?\w+", command):
        return actor[0]
    if "dashboard.py" in command:
        return "dashboard.py"
    return "kvroute serve" if "kvroute.cli" in command else process.name()


def is_loopback(address: str) -> bool:
    parsed = ip_address(address)
    mapped = parsed.ipv4_mapped if isinstance(parsed, IPv6Address) else None
    return is_local(str(mapped or parsed))


def test_no_process_yields_to_other_programs_on_the_machine(cluster: Cluster) -> None:
    wanted = psutil.Process(cluster.process.pid).nice()
    found = dict[str, int]()
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found[f"{name_of(process)} {process.pid}"] = process.nice()
    assert any("Replica" in name for name in found)
    assert {name: nice for name, nice in found.items() if nice != wanted} == {}


def test_every_process_that_listens_is_documented_and_on_loopback(cluster: Cluster) -> None:
    documented = {*TABLE.findall((ROOT / "docs/operations/ports.md").read_text())}
    found = [*listening(cluster)]
    names = {name for name, _ in found}
    assert names <= documented
    # Ray's dashboard has one fixed port, which another cluster on this machine may have.
    assert documented - names <= {"dashboard.py"}
    assert [(name, address) for name, address in found if not is_loopback(address)] == []
