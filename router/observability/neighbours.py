"""Registers the cluster in Redis, and finds other clusters that use the same Redis."""

import asyncio
import contextlib
from typing import Any

import msgspec

from kvroute.store.clusters import SILENCE_S, ClusterModel, Clusters
from kvroute.store.connection import REDIS_ERRORS


class Neighbours:
    """Other clusters in this Redis that serve a model with the same name as this cluster's."""

    def __init__(self, clusters: Clusters, own: ClusterModel) -> None:
        self._clusters = clusters
        self._own = own
        self.can_write = True  # False if the last write to Redis failed

    async def run(self) -> None:
        """Renew the cluster's registration until cancelled."""
        while True:
            try:
                await self._clusters.announce(self._own)
                self.can_write = True
            except REDIS_ERRORS:  # index/feed.py logs an outage of Redis
                self.can_write = False
            await asyncio.sleep(SILENCE_S / 3)

    async def leave(self) -> None:
        """Remove the cluster's registration; ignore errors of Redis."""
        with contextlib.suppress(*REDIS_ERRORS):
            await self._clusters.withdraw(self._own)

    async def report(self) -> dict[str, Any]:
        """Return this cluster, and the others that serve a model of the same name.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        others = [
            {**msgspec.structs.asdict(other), "is_twin": other.is_twin_of(self._own)}
            for other in await self._clusters.all()
            if other.model == self._own.model and other != self._own
        ]
        return {"own": msgspec.structs.asdict(self._own), "others": others}
