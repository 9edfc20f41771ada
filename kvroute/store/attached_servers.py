"""Which replica uses which attached server. Such a server is a vLLM server that the user runs.

    kvroute:{TAG}:attached:URL    string    id of the replica that uses this server; has a lease

{TAG} is the same as in the index (keys.py). All replicas of a model have the same list of servers.
Each replica claims one server and renews its claim. The claim of a dead replica expires.
"""

from collections.abc import Sequence
from typing import Any

import redis.asyncio as redis

from kvroute.store.connection import with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

# ARGV the replica's id, lease in ms. Returns 1 if the replica has the claim, else 0.
_TAKE = """
if redis.call('SET', KEYS[1], ARGV[1], 'NX', 'PX', ARGV[2]) then return 1 end
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return 1
"""
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then redis.call('DEL', KEYS[1]) end"


class AttachedServers:
    """The claims of one model's replicas.

    All methods raise RedisError or OSError if Redis is unreachable.
    """

    def __init__(
        self, client: "redis.Redis", model: str, *, cluster: str = DEFAULT_CLUSTER, lease_s: float
    ) -> None:
        self._take: Any = client.register_script(_TAKE)
        self._release: Any = client.register_script(_RELEASE)
        self._prefix = f"{key_prefix(cluster, model)}:attached:"
        self.lease_s = lease_s  # seconds after which a claim expires unless it is renewed

    async def claim(self, urls: Sequence[str], replica_id: str) -> str | None:
        """Claim the first server that no other replica has; return None if all are claimed."""
        for url in urls:
            if await self.renew(url, replica_id):
                return url
        return None

    @with_timeout
    async def renew(self, url: str, replica_id: str) -> bool:
        """Claim the server, or renew the claim. Return False if another replica has the server."""
        return bool(
            await self._take(
                keys=[self._prefix + url], args=[replica_id, round(1e3 * self.lease_s)]
            )
        )

    @with_timeout
    async def release(self, url: str, replica_id: str) -> None:
        """Give the claim up, so that another replica can claim the server at once."""
        await self._release(keys=[self._prefix + url], args=[replica_id])
