"""The addresses of all processes' metrics, in the format of Prometheus's HTTP service discovery.

Every process serves its metrics on a port of its own. A replica's address is in its record in the
index. Announcer writes a router's address to the index, so that any router can list all addresses.
"""

import asyncio
import contextlib
import os
from typing import Any

from kvroute.contract.ranks import replica_of
from kvroute.contract.records import ProcessLocation, RouterDescription
from kvroute.process.metrics_port import Exposition
from kvroute.store.connection import REDIS_ERRORS
from kvroute.store.index import Index

LEASE_S = 3.0  # seconds after which the address of a lost router is removed
RETRY_S = 0.5  # seconds between two attempts to reach Redis

Target = dict[str, Any]


class Announcer:
    """Writes the address of one router's metrics to the index, and renews its lease."""

    def __init__(self, index: Index, router_id: str, exposition: Exposition, node: str) -> None:
        self._index = index
        self._router_id = router_id
        self._exposition = exposition
        whereabouts = ProcessLocation(node, os.getpid(), exposition.address)
        self._description = RouterDescription(whereabouts)

    async def run(self) -> None:
        """Renew the router's lease until cancelled."""
        while True:
            try:
                await self._index.announce_router(
                    self._router_id, self._description, lease_s=LEASE_S
                )
                await asyncio.sleep(LEASE_S / 3)
            except REDIS_ERRORS:
                await asyncio.sleep(RETRY_S)  # index/feed.py logs the outage

    async def leave(self) -> None:
        """Remove the address from the index and close the port."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._index.withdraw_router(self._router_id)
        await asyncio.to_thread(self._exposition.close)


async def targets(index: Index, model: str) -> list[Target]:
    """Return every process that has a valid lease and serves metrics.

    Raises:
        RedisError, OSError: Redis cannot be used.
    """
    records = await index.records()
    replicas = {replica_of(record.id): record.whereabouts for record in records}
    routers = {id_: router.whereabouts for id_, router in (await index.routers()).items()}
    return [
        {
            "targets": [process.metrics],
            "labels": {"model": model, "role": role, role: process_id, "node": process.node},
        }
        for role, processes in (("replica", replicas), ("router", routers))
        for process_id, process in processes.items()
        if process.metrics
    ]
