"""A real Prometheus for tests, which scrapes a cluster with kvroute's own configuration."""

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import requests

from kvroute.local.ports import free_port

CONFIG = Path(__file__).parents[2] / "deploy" / "prometheus" / "prometheus.yml"
READY_S = 30.0  # timeout of Prometheus's start in seconds


@dataclass(frozen=True)
class Prometheus:
    url: str

    def get(self, path: str, **parameters: str) -> Any:
        """Send a request, and return the data of the response. Fails if it is an error."""
        answer = requests.get(f"{self.url}/api/v1/{path}", params=parameters, timeout=30)
        assert answer.ok, answer.text
        return answer.json()["data"]

    def values(self, expression: str) -> list[float]:
        """Return the current value of an expression for each series."""
        result = self.get("query", query=expression)["result"]
        return [float(series["value"][1]) for series in result]


class Reachable(Protocol):
    @property
    def url(self) -> str: ...


@contextmanager
def prometheus(cluster: Reachable, *, key: str = "") -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes the cluster.

    The shipped configuration is changed in two ways: Prometheus scrapes every second, and it sends
    the API key if there is one.
    """
    with TemporaryDirectory() as folder:
        config = Path(folder) / CONFIG.name
        config.write_text(_hasty(CONFIG.read_text(), cluster.url, key))
        (Path(folder) / "alerts.yml").symlink_to(CONFIG.parent / "alerts.yml")
        address = f"127.0.0.1:{free_port()}"
        process = subprocess.Popen(
            [
                *("prometheus", f"--config.file={config}", f"--web.listen-address={address}"),
                *(f"--storage.tsdb.path={folder}/data", "--log.level=error"),
            ]
        )
        try:
            _wait(f"http://{address}/-/ready")
            yield Prometheus(f"http://{address}")
        finally:
            process.terminate()
            process.wait(30)


def _hasty(config: str, url: str, key: str) -> str:
    config = re.sub(r"\b1[05]s\b", "1s", config).replace("http://127.0.0.1:8000", url)
    if not key:
        return config
    return re.sub(r"# (authorization: {.*credentials)_file: [^}]*", rf"\1: {key}", config)


def _wait(url: str) -> None:
    deadline = time.monotonic() + READY_S
    while not _is_ready(url):
        assert time.monotonic() < deadline, f"nobody answers at {url}"
        time.sleep(0.1)


def _is_ready(url: str) -> bool:
    try:
        return requests.get(url, timeout=5).ok
    except requests.ConnectionError:
        return False
