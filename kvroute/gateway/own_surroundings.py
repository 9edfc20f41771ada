"""The surroundings of a router that runs with its agents in one process."""

import asyncio
import logging
import socket
from typing import Any

from kvroute.local.ray_cluster import WILDCARD_ADDRESSES

FORMAT = "%(asctime)s %(levelname)s %(message)s"


class OneProcess:
    """The place of a router and its agents. Implements process.surroundings.Surroundings.

    Args:
        host: the address that the HTTP endpoint listens on.
        cluster: the id of the cluster.
    """

    application = "kvroute"

    def __init__(self, host: str, cluster: str) -> None:
        self.address = _own_address(host)
        # Processes of one cluster share its servers, so that they have one address.
        self.cluster_address = cluster
        self._ends = asyncio.Event()

    def drain(self) -> None:
        """Announce that the process gets no more requests."""
        self._ends.set()

    async def draining(self) -> None:
        await self._ends.wait()

    def log(self, model: str | None) -> None:
        """Write warnings to standard error."""
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(FORMAT))
        ours = logging.getLogger("kvroute")
        ours.handlers = [handler]
        ours.setLevel(logging.WARNING)
        ours.propagate = False

    async def facts(self, port: int) -> dict[str, Any]:
        return {"host": self.address, "nodes": None, "serve": None}


def _own_address(host: str) -> str:
    """Return an address at which other machines reach this one, if it listens on all addresses."""
    if host not in WILDCARD_ADDRESSES:
        return host
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent; this only chooses a route
        except OSError:
            return WILDCARD_ADDRESSES[host]
        return str(probe.getsockname()[0])
