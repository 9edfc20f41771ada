"""The list of clusters that use this Redis: one entry for each model of each cluster.

Every router adds its models' entries and refreshes them; entries without a refresh expire.

kvroute:clusters    zset    JSON of ClusterModel -> time of its last refresh, on Redis's clock
"""

from typing import Any

import msgspec
import redis.asyncio as redis
from msgspec import Struct

from kvroute.contract.records import Name, encode
from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable
from kvroute.store.connection import with_timeout

KEY = "kvroute:clusters"
SILENCE_S = 30.0  # seconds without a refresh after which an entry expires
MAX_ENTRIES = 200  # maximum number of entries to read; the latest ones are read

# ARGV entry, time now, "(" + the time before which entries are removed, lease of the key; all in s
_ANNOUNCE = """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
redis.call('ZADD', KEYS[1], ARGV[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[3])
redis.call('EXPIRE', KEYS[1], ARGV[4])
"""


class ClusterModel(Struct, frozen=True, order=True):
    """One model of one cluster."""

    cluster: Name  # id of the cluster
    model: Name
    ray_address: Name
    application: Name  # name of the application in Ray Serve

    def is_twin_of(self, other: "ClusterModel") -> bool:
        """Return whether `other` is a different deployment that uses the same Redis keys."""
        return self != other and (self.cluster, self.model) == (other.cluster, other.model)


class Clusters:
    """The list of clusters. All methods raise RedisError or OSError if Redis is unreachable."""

    def __init__(self, client: "redis.Redis", unreadable: Unreadable) -> None:
        self._redis: Any = client
        self._unreadable = unreadable
        self._announce = client.register_script(_ANNOUNCE)
        self._decode = msgspec.json.Decoder(ClusterModel).decode

    @with_timeout
    async def announce(self, entry: ClusterModel) -> None:
        """Add or refresh this router's entry, which expires after SILENCE_S."""
        now_s = await self._now_s()
        limit_s, lease_s = f"({now_s - SILENCE_S}", round(SILENCE_S)
        await self._announce(keys=[KEY], args=[encode(entry), now_s, limit_s, lease_s])

    @with_timeout
    async def withdraw(self, entry: ClusterModel) -> None:
        """Remove this router's entry. Other routers with the same entry add it again later."""
        await self._redis.zrem(KEY, encode(entry))

    @with_timeout
    async def all(self) -> list[ClusterModel]:
        """Return the entries that have not expired, at most MAX_ENTRIES."""
        oldest_s = await self._now_s() - SILENCE_S
        members = await self._redis.zrevrangebyscore(
            KEY, "+inf", oldest_s, start=0, num=MAX_ENTRIES
        )
        entries = []
        for member in members:
            try:
                entries.append(self._decode(member))
            except DECODE_ERRORS as error:
                self._unreadable.add("cluster", member, error)
        return sorted(entries)

    async def _now_s(self) -> float:
        seconds, microseconds = await self._redis.time()
        return float(seconds + microseconds / 1e6)
