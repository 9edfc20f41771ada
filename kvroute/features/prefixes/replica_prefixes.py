"""The named prefixes of a model in one of its replicas: what the core calls."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import msgspec

from kvroute.features.prefixes.prefix_options import ReplicaPrefixSettings
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warmer import Warmer
from kvroute.features.replica_feature import ReplicaBase, ReplicaFeature


class ReplicaPrefixes(ReplicaFeature):
    """Keeps named prefixes in the cache of each rank."""

    name = "prefixes"

    def __init__(self, base: ReplicaBase, settings: ReplicaPrefixSettings) -> None:
        self._declared = settings.declared
        name, cluster = base.settings.served_model_name, base.settings.cluster
        store = Prefixes(base.redis, name, cluster=cluster, unreadable=base.index.unreadable)
        self._warmers = [
            Warmer(
                rank.engine,
                store,
                base.index,
                replica_id=rank.id,
                on_change=rank.publisher.renew_soon,
            )
            for rank in base.ranks
        ]

    async def start(self) -> None:
        await asyncio.gather(*(warmer.start(self._declared) for warmer in self._warmers))

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        return {f"warmer {rank}": warmer.run() for rank, warmer in enumerate(self._warmers)}

    def report(self, rank: int) -> bytes | None:
        warm = self._warmers[rank].cached()
        return msgspec.msgpack.encode(warm) if warm else None
