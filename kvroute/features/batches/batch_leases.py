"""The leases of batches: which router runs a batch.

kvroute:{CLUSTER/}:batch:BATCH    string    id of the router; it expires unless the router renews it

A lease only saves work: it keeps two routers from running the same batch. Even without leases, each
line gets exactly one result (batch_state.py).
"""

from typing import Any

import redis.asyncio as redis

from kvroute.store.connection import with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

LEASE_S = 6.0  # seconds without a renewal after which another router takes over

# KEYS lease; ARGV router, lease in ms. Take or renew the lease. Return 1 if this router now has it.
_TAKE = """
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
"""
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end
"""


class BatchLeases:
    """The leases of all batches of a cluster.

    All methods raise RedisError or OSError if Redis is unreachable.
    """

    def __init__(
        self, client: "redis.Redis", router: str, *, cluster: str = DEFAULT_CLUSTER
    ) -> None:
        self._router = router
        self._prefix = f"{key_prefix(cluster, '')}:batch"
        self._take: Any = client.register_script(_TAKE)
        self._release: Any = client.register_script(_RELEASE)

    @with_timeout
    async def take(self, batch: str) -> bool:
        """Take or renew a lease; return False if another router has it."""
        args = [self._router, round(1000 * LEASE_S)]
        return bool(await self._take(keys=[f"{self._prefix}:{batch}"], args=args))

    @with_timeout
    async def release(self, batch: str) -> None:
        """Give a lease back, if this router has it."""
        await self._release(keys=[f"{self._prefix}:{batch}"], args=[self._router])
