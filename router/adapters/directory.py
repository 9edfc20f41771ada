"""The router's copy of all added LoRA adapters, which it keeps equal to those in Redis.

The removal of an adapter takes three steps. First, its record says that it is leaving, so that all
routers refuse new requests for it. Then each router reports when its last request for it has ended.
When all running routers have done so, the record is removed, and the replicas unload the adapter.
Every router does its part of every removal, so a removal goes on if the router that began it dies.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection

from redis.exceptions import RedisError

from kvroute.adapters.added import AddedAdapter, own_name
from kvroute.adapters.uses import Uses
from kvroute.process.outage import Outage
from kvroute.store.adapters import Adapters

log = logging.getLogger("kvroute.adapters")

POLL_S = 0.25  # seconds between two checks of Redis for changes
RETRY_S = 0.5  # seconds between two attempts to reach Redis


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
        self._revision: int | None = None  # revision of the adapters in memory; None: not read yet
        self._read_s = -1.0  # time at which the last read began
        self._reading = asyncio.Lock()
        self._outage = Outage(log, "the added LoRA adapters stay as they are")

    async def run(self) -> None:
        """Follow Redis until cancelled."""
        while True:
            try:
                await self.refresh()
                await self._remove_unused()
                self._outage.end()
                await asyncio.sleep(POLL_S)
            except (RedisError, OSError) as error:
                self._outage.begin(error)
                await asyncio.sleep(RETRY_S)

    @property
    def all(self) -> Collection[AddedAdapter]:
        """Return all adapters, the oldest first, with those that are being removed."""
        return self._by_key.values()

    @property
    def is_complete(self) -> bool:
        """Return whether the adapters were read from Redis, which has had some since its start."""
        return bool(self._revision)

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
        """Read the adapters if they have changed since this call.

        Calls at the same time share one read.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        asked_s = time.monotonic()
        async with self._reading:
            if self._read_s >= asked_s:
                return
            self._read_s = time.monotonic()
            revision = await self.store.revision()
            if not revision and self._by_key:
                await self.store.restore([*self._by_key.values()])
                revision = await self.store.revision()
            if revision != self._revision:
                self._learn(await self.store.all())
                self._revision = revision

    async def refresh_if_possible(self) -> None:
        """Read the adapters if they have changed. If Redis is away, they stay as they are."""
        try:
            await self.refresh()
        except (RedisError, OSError) as error:
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
