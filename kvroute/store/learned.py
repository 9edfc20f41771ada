"""Statistics of conversations that routers have learned, stored for routers that start later.

    kvroute:{TAG}:learned    string    msgpack of returns.Counts, kept for KEPT_S

{TAG} is the same as in the index (keys.py). All routers learn the same statistics, so each one may
overwrite the key.
"""

from typing import Any

import redis.asyncio as redis

from kvroute.store.connection import answered
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

KEPT_S = 86_400  # seconds after the last write until the key expires


class Learned:
    """The statistics of one model of one cluster. Its methods raise RedisError or OSError."""

    def __init__(
        self, client: "redis.Redis", model: str, *, cluster: str = DEFAULT_CLUSTER
    ) -> None:
        self._redis: Any = client
        self._key = f"{key_prefix(cluster, model)}:learned"

    @answered
    async def get(self) -> bytes | None:
        packed: bytes | None = await self._redis.get(self._key)
        return packed

    @answered
    async def put(self, packed: bytes) -> None:
        await self._redis.set(self._key, packed, ex=KEPT_S)
