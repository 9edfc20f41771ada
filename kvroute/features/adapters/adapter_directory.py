"""The router's copy of all added LoRA adapters, which it keeps equal to those in Redis.

The removal of an adapter takes three steps. First, its record says that it is leaving, so that all
routers refuse new requests for it. Then each router reports when its last request for it has ended.
When all running routers have done so, the record is removed, and the replicas unload the adapter.
Every router does its part of every removal, so a removal goes on if the router that began it dies.
"""

import logging
from collections.abc import Awaitable, Callable, Collection

from kvroute.features.adapters.adapter_store import Adapters
from kvroute.features.adapters.adapter_uses import Uses
from kvroute.features.adapters.added import AddedAdapter, own_name
from kvroute.store.connection import REDIS_ERRORS, Outage
from kvroute.store.revision import Follower

log = logging.getLogger("kvroute.adapters")


class AdapterDirectory:
    """Follows the added adapters of one model, and restores them if Redis has lost them.

    Args:
        store: the adapters in Redis.
        router: id of this router.
        routers: returns the ids of all running routers, according to Redis.
    """

    def __init__(
        self, store: Adapters, router: str, routers: Callable[[], Awaitable[Collection[str]]]
    ) -> None:
        self.store = store
        self._router = router
        self._routers = routers
        self._by_key: dict[str, AddedAdapter] = {}
        self._by_id: dict[str, AddedAdapter] = {}  # without those that are leaving
        self.uses = Uses()  # this router's requests; an adapter that has some is not removed
        self._reported: set[str] = set()  # keys of leaving adapters that were reported as unused
        self._copy = Follower(store, restores=True, on_change=self._learn)

    async def run(self) -> None:
        """Follow Redis until cancelled."""
        outage = Outage(log, "the added LoRA adapters stay as they are")
        await self._copy.run(self._remove_unused, outage)

    @property
    def all(self) -> Collection[AddedAdapter]:
        """Return all adapters, the oldest first, with those that are being removed."""
        return self._by_key.values()

    def find(self, name: str, tenant: str = "") -> AddedAdapter | None:
        """Return the adapter that requests of a tenant get by this name.

        If the tenant and all tenants have an adapter with this name, it is the tenant's.
        """
        own = self._by_id.get(own_name(tenant, name)) if tenant else None
        return own or self._by_id.get(name)

    def usable(self, tenant: str = "") -> list[AddedAdapter]:
        """Return the adapters that requests of a tenant can use, the oldest first."""
        return [
            adapter
            for adapter in self._by_id.values()
            if self.find(adapter.name, tenant) is adapter
        ]

    def get(self, key: str) -> AddedAdapter | None:
        """Return the adapter with this key, also while it is being removed."""
        return self._by_key.get(key)

    async def refresh(self) -> None:
        """Read the adapters if they have changed. Raises RedisError or OSError."""
        await self._copy.refresh()

    async def refresh_if_possible(self) -> None:
        """Read the adapters if they have changed. If Redis is away, they stay as they are."""
        try:
            await self.refresh()
        except REDIS_ERRORS as error:
            log.debug("the added LoRA adapters cannot be read: %s", error)

    def _learn(self, adapters: Collection[AddedAdapter]) -> None:
        self._by_key = {adapter.key: adapter for adapter in adapters}
        self._by_id = {adapter.id: adapter for adapter in adapters if not adapter.is_leaving}
        self._reported &= {adapter.key for adapter in adapters if adapter.is_leaving}

    async def _remove_unused(self) -> None:
        """Do this router's part in the removal of the adapters that are leaving."""
        leaving = [adapter.key for adapter in self.all if adapter.is_leaving]
        unused = [key for key in leaving if not self.uses.of(key)]
        for key in unused:
            if key not in self._reported:
                await self.store.is_unused(key, self._router)
                self._reported.add(key)
        if unused:
            routers = {self._router, *await self._routers()}
            for key in unused:
                if await self.store.remove_unused(key, routers):
                    log.info("the LoRA adapter %s is removed", key)
