"""Where the cluster's metrics are, in the words of Prometheus's HTTP service discovery.

Every process listens on a port of its own. A replica's stands in its record in the index; a router
announces itself here, so that any router can name them all.
"""

import asyncio
import contextlib
import os
from typing import Any

from redis.exceptions import RedisError

from replica.exposition import Exposition
from replica.kvindex.index import Index

LEASE_S = 3.0
RETRY_S = 0.5  # between attempts while Redis is away

Target = dict[str, Any]


class Announcer:
    """One router's metrics, at an address that all know."""

    def __init__(self, index: Index, router_id: str, exposition: Exposition, node: str) -> None:
        self._index = index
        self._router_id = router_id
        self._exposition = exposition
        self._facts = {"node": node, "pid": os.getpid(), "metrics": exposition.address}

    async def run(self) -> None:
        """Renews the router's lease until cancelled."""
        while True:
            try:
                await self._index.announce_router(self._router_id, self._facts, lease_s=LEASE_S)
                await asyncio.sleep(LEASE_S / 3)
            except (RedisError, OSError):
                await asyncio.sleep(RETRY_S)  # the feed says that Redis is away

    async def leave(self) -> None:
        """Nobody is told the address any more, and nobody listens there."""
        with contextlib.suppress(RedisError, OSError):
            await self._index.withdraw_router(self._router_id)
        await asyncio.to_thread(self._exposition.close)


async def targets(index: Index, model: str) -> list[Target]:
    """Every process whose lease runs and which has metrics. RedisError or OSError without Redis."""
    replicas = {record.id: record.facts for record in await index.records()}
    routers = await index.routers()
    return [
        {
            "targets": [facts["metrics"]],
            "labels": {"model": model, "role": role, role: process_id, "node": facts["node"]},
        }
        for role, processes in (("replica", replicas), ("router", routers))
        for process_id, facts in processes.items()
        if facts.get("metrics")
    ]
