"""The folders in which the routers of a cluster keep files. There should be only one.

kvroute:{CLUSTER/}:file-places    zset    id of the folder -> time of its last announcement, in s
"""

from typing import Any

import redis.asyncio as redis
from redis.exceptions import ResponseError

from kvroute.store.connection import SharedClock, with_timeout
from kvroute.store.keys import DEFAULT_CLUSTER, key_prefix

SILENCE_S = 10.0  # seconds after which a folder without an announcement is forgotten


class FilePlaces:
    """The list of folders. It raises RedisError or OSError if Redis is unreachable."""

    def __init__(self, client: "redis.Redis", *, cluster: str = DEFAULT_CLUSTER) -> None:
        self._redis: Any = client
        self._key = f"{key_prefix(cluster, '')}:file-places"
        self.clock = SharedClock()  # updated with each announcement

    @with_timeout
    async def announce(self, place: str) -> int:
        """Announce this router's folder; return the number of folders."""
        try:
            self.clock.update(await self._redis.time())
        except ResponseError as error:
            self.clock.update(error)
        now_s = self.clock.now_s()
        pipeline = self._redis.pipeline(transaction=True)
        pipeline.zadd(self._key, {place: now_s})
        pipeline.zremrangebyscore(self._key, "-inf", now_s - SILENCE_S)
        pipeline.zcard(self._key)
        pipeline.expire(self._key, round(SILENCE_S))
        _, _, count, _ = await pipeline.execute()
        return int(count)
