"""A cluster, the processes that a token passes through, and the ports for requests."""

import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.bench.stream.load import Processes
from tests.support.serving import Cluster, start_cluster

TITLES = {
    "router": "kvroute:Router",
    "replica": "kvroute:Replica",
    "HAProxy": "program/haproxy",
}
ROUTER = re.compile(r"^\s+server \S+ \S+:(\d+)\s.*\bcheck(?! backup)\b", re.MULTILINE)


@dataclass(frozen=True)
class Serving:
    cluster: Cluster

    @property
    def port(self) -> int:
        return int(self.cluster.url.rpartition(":")[2])

    @property
    def router_port(self) -> int | None:
        """Return the router's port in HAProxy's configuration; None if it cannot be read there."""
        for process in self._of("HAProxy"):
            with suppress(psutil.Error, ValueError, OSError):
                args = process.cmdline()
                config = Path(args[args.index("-f") + 1]).read_text()
                if server := ROUTER.search(config):
                    return int(server[1])
        return None

    def processes(self) -> Processes:
        return {role: [process.pid for process in self._of(role)] for role in TITLES}

    def _of(self, role: str) -> list[psutil.Process]:
        return self.cluster.titled(TITLES[role])


@contextmanager
def serving(*, replicas: int, decode_ms: float) -> Iterator[Serving]:
    """Run a cluster with one router, and with simulated replicas without prefill time."""
    with start_cluster(
        *("--engine", "simulated", "--routers", "1", "--replicas", str(replicas), "--no-ui"),
        *("--simulated-prefill-tokens-per-s", "0", "--simulated-decode-ms", str(decode_ms)),
    ) as cluster:
        yield Serving(cluster)
