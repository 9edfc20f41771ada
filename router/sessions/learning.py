"""A router that starts knows what the others have learned of conversations."""

import asyncio
import logging

from redis.exceptions import RedisError, ResponseError

from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable
from kvroute.router.sessions.returns import Returns, decode_counts, encode_counts
from kvroute.store.learned import Learned
from kvroute.store.outage import Outage

log = logging.getLogger("kvroute.learning")

SAVE_S = 30.0  # between two writes
RETRY_S = 2.0  # while Redis is away at the start


class Learning:
    """Keeps the counts of one model in Redis."""

    def __init__(self, store: Learned, returns: Returns, unreadable: Unreadable) -> None:
        self._store = store
        self._returns = returns
        self._unreadable = unreadable
        self._outage = Outage(log, "what is learned of conversations is not kept")

    async def run(self) -> None:
        """Until cancelled."""
        while not await self._begin():
            await asyncio.sleep(RETRY_S)
        while True:
            await asyncio.sleep(SAVE_S)
            await self._save()

    async def _begin(self) -> bool:
        """Goes on from what is known; False while Redis is away."""
        try:
            if packed := await self._store.get():
                self._returns.counts.add(decode_counts(packed))
        except (ResponseError, *DECODE_ERRORS) as error:  # of another writer; we replace it
            self._unreadable.add("learned", "of conversations", error)
        except (RedisError, OSError) as error:
            self._outage.begin(error)
            return False
        self._outage.end()
        return True

    async def _save(self) -> None:
        try:
            await self._store.put(encode_counts(self._returns.counts))
            self._outage.end()
        except (RedisError, OSError) as error:
            self._outage.begin(error)
