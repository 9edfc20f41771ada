"""The surroundings of a router that runs with its agents in one process."""

import asyncio
import os
from typing import Any

LOOPBACK = "127.0.0.1"


class OneProcess:
    """The place of a router and its agents. Implements process.surroundings.Surroundings.

    Args:
        host: the address that the HTTP endpoint listens on.
        cluster: the id of the cluster.
    """

    application = "kvroute"

    def __init__(self, host: str, cluster: str) -> None:
        self.address = host
        self.cluster_address = f"{cluster}:{os.getpid()}"
        self._ends = asyncio.Event()

    def drain(self) -> None:
        """Announce that the process gets no more requests."""
        self._ends.set()

    async def draining(self) -> None:
        await self._ends.wait()

    def log(self, model: str | None) -> None:
        """Write records to the terminal, which shows warnings only."""

    async def facts(self, port: int) -> dict[str, Any]:
        return {"host": self.address, "nodes": None, "serve": None}
