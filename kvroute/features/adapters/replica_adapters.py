"""The added adapters of one replica: what the core calls."""

from collections.abc import Coroutine, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from kvroute.contract.generation import GenerateRequest
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.added import FEATURE, TAKES_ADDED, decode_order, encode_files
from kvroute.features.adapters.added_adapters import AddedAdapters
from kvroute.features.replica_feature import Method, ReplicaBase, ReplicaFeature


class ReplicaAdapters(ReplicaFeature):
    """Checks, admits, warms and drops added adapters."""

    name = FEATURE

    def __init__(self, base: ReplicaBase) -> None:
        settings, self._ranks = base.settings, base.ranks
        self._root = settings.lora_root
        self._added = AddedAdapters(
            [rank.engine for rank in base.ranks],
            Adapters(base.redis, settings.served_model_name, cluster=settings.cluster),
            root=self._root,
            max_rank=settings.max_lora_rank,
            on_change=self._renew_soon,
        )

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"adapters": self._added.run()} if self._root else {}

    def methods(self) -> Mapping[str, Method]:
        return {"check_adapter": self._check}

    def around(self, request: GenerateRequest, data: bytes) -> AbstractAsyncContextManager[None]:
        return self._added.using(decode_order(data))

    def report(self, rank: int) -> bytes | None:
        return TAKES_ADDED if self._ranks[rank].engine.can_add_adapters else None

    async def _check(self, adapter: bytes, rank: int) -> bytes:
        """Load an adapter that is to be added, and unload it again.

        Args:
            adapter: An encoded Adapter. Its name is used in error messages only.
            rank: The number of the rank that loads it.

        Returns:
            An encoded AdapterFiles.
        """
        return encode_files(await self._added.check(decode_order(adapter), rank))

    def _renew_soon(self) -> None:
        for rank in self._ranks:
            rank.publisher.renew_soon()
