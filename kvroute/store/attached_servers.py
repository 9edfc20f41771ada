"""Which replica uses which attached server. Such a server is a vLLM server that the user runs.

    kvroute:{TAG}:attached:URL    string    id of the replica that uses this server; has a lease
    kvroute:{TAG}:away            hash      URL -> why requests cannot be sent to this server

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
_NOW_MS = "local time = redis.call('TIME'); local now = 1000 * time[1] + time[2] / 1000\n"
# ARGV URL, reason (empty: none), lease in ms. A value is when the report expires, and the reason.
_REPORT = (
    _NOW_MS
    + """
if ARGV[2] == '' then return redis.call('HDEL', KEYS[1], ARGV[1]) end
redis.call('HSET', KEYS[1], ARGV[1], string.format('%.0f:', now + ARGV[3]) .. ARGV[2])
redis.call('PEXPIRE', KEYS[1], ARGV[3])
"""
)
_AWAY = (
    _NOW_MS
    + """
local reports, away = redis.call('HGETALL', KEYS[1]), {}
for i = 1, #reports, 2 do
    local expires, reason = string.match(reports[i + 1], '^(%d+):(.*)$')
    if expires and tonumber(expires) > now then
        table.insert(away, reports[i])
        table.insert(away, reason)
    end
end
return away
"""
)


class AttachedServers:
    """The claims of one model's replicas.

    All methods raise RedisError or OSError if Redis is unreachable.
    """

    def __init__(
        self,
        client: "redis.Redis",
        model: str,
        *,
        cluster: str = DEFAULT_CLUSTER,
        lease_s: float = 0.0,
    ) -> None:
        self._take: Any = client.register_script(_TAKE)
        self._release: Any = client.register_script(_RELEASE)
        self._report: Any = client.register_script(_REPORT)
        self._away: Any = client.register_script(_AWAY)
        self._prefix = f"{key_prefix(cluster, model)}:attached:"
        self._away_key = f"{key_prefix(cluster, model)}:away"
        self.lease_s = lease_s  # seconds until a claim or report expires; 0 for those who only read

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

    @with_timeout
    async def report(self, url: str, reason: str) -> None:
        """Report why requests cannot be sent to a server; empty: they can.

        A report expires like a claim, so it has to be repeated.
        """
        await self._report(keys=[self._away_key], args=[url, reason, round(1e3 * self.lease_s)])

    @with_timeout
    async def away(self) -> dict[str, str]:
        """Return the servers to which no requests can be sent, and why: URL -> reason."""
        words = [word.decode(errors="replace") for word in await self._away(keys=[self._away_key])]
        return dict(zip(words[::2], words[1::2], strict=True))
