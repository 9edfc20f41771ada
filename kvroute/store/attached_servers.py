"""Which replica serves which attached server.

    kvroute:{TAG}:attached:URL    string    id of the replica that serves the server; has a lease

{TAG} is the same as in the index (keys.py). Every replica takes one server of the list that all
replicas of the model have, and renews its claim. A claim of a replica that died expires.
"""

from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis

from kvroute.store.connection import with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

# ARGV replica, lease in ms. Returns whether the replica has the claim.
_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class AttachedServers:
    """The claims of one model. All methods raise RedisError or OSError if Redis is unreachable."""

    def __init__(
        self, client: "redis.Redis", model: str, *, cluster: str = DEFAULT_CLUSTER, lease_s: float
    ) -> None:
        self._take: Any = client.register_script(_TAKE)
        self._release: Any = client.register_script(_RELEASE)
        self._prefix = f"{key_prefix(cluster, model)}:attached:"
        self.lease_s = lease_s  # seconds after which a claim expires unless it is renewed

    async def claim(self, urls: Sequence[str], replica_id: str) -> str | None:
        """Claim the first server that no other replica serves; None: all are taken."""
        for url in urls:
            if await self.renew(url, replica_id):
                return url
        return None

    @with_timeout
    async def renew(self, url: str, replica_id: str) -> bool:
        """Renew or take the claim. Return False if another replica has it."""
        return bool(
            await self._take(
                keys=[self._prefix + url], args=[replica_id, round(1e3 * self.lease_s)]
            )
        )

    @with_timeout
    async def release(self, url: str, replica_id: str) -> None:
        """Give the claim up, so that another replica can take it at once."""
        await self._release(keys=[self._prefix + url], args=[replica_id])
