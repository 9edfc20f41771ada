"""The added adapters of one model in one router: what the core calls."""

from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from kvroute.blocks.variants import is_key
from kvroute.features.adapters.adapter_directory import AdapterDirectory
from kvroute.features.adapters.adapter_operations import AdapterOperations
from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.added import FEATURE, AddedAdapter, encode_order, takes_added
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call

if TYPE_CHECKING:
    from kvroute.router.placement.fleet import Fleet
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.router_base import RouterBase


class RouterAdapters(RouterFeature):
    """The variants of the model that operators have added."""

    name = FEATURE
    operations: AdapterOperations  # what operators do; from `attach` on

    def __init__(self, base: "RouterBase") -> None:
        self._settings = base.settings
        # Replica id -> whether it takes added adapters. True if it has no record.
        self._able: dict[str, bool] = {}
        self.directory = AdapterDirectory(
            Adapters(base.redis, base.model, cluster=base.cluster, unreadable=base.unreadable),
            base.router_id,
            base.index.routers,
        )

    def attach(self, parts: "Parts") -> None:
        self.operations = AdapterOperations(
            self.directory, parts.questions, parts.fleet.replicas, self._settings
        )

    def updated(self, fleet: "Fleet") -> None:
        self._able = {record.id: takes_added(record) for record in fleet.replicas.records}

    def usable(self, variant: str, replica_ids: Sequence[str]) -> Sequence[str]:
        if not is_key(variant):  # it is one of --lora
            return replica_ids
        return [id_ for id_ in replica_ids if self._able.get(id_, True)]

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"adapters": self.directory.run()} if self._settings.lora_root else {}

    def variant(self, name: str, tenant: str) -> str | None:
        added = self.directory.find(name, tenant)
        return added.key if added else None

    async def look_for(self, name: str) -> None:
        if self._settings.lora_root:
            await self.directory.refresh_if_possible()

    def cards(self, tenant: str) -> Sequence[Mapping[str, Any]]:
        return [
            {"id": adapter.name, "root": adapter.path, "created": int(adapter.created_s)}
            for adapter in self.directory.usable(tenant)
        ]

    def with_data(self, call: Call) -> AbstractContextManager[Call]:
        added = self.directory.get(call.variant)
        return nullcontext(call) if added is None else self._using(call, added)

    @contextmanager
    def _using(self, call: Call, added: AddedAdapter) -> Iterator[Call]:
        """Keep the adapter until the call has ended, and tell replicas where its files are."""
        with self.directory.uses.use(added.key):
            data = encode_order(added.as_adapter)
            yield replace(call, features={**call.features, self.name: data})
