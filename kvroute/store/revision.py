"""A number in Redis that is new after each change of the values that it belongs to."""

import time
from collections.abc import Awaitable, Callable
from typing import Any

NUMBER_DIGITS = 18  # maximum number of digits in a number; longer numbers are unreadable


class Revision:
    """The revision of some values. All changes of them are transactions of this class."""

    def __init__(self, client: Any, key: str) -> None:
        """Create the client of a revision.

        Args:
            client: the client for Redis.
            key: the revision's key.
        """
        self._redis = client
        self._key = key

    async def read(self) -> int:
        """Return the revision; 0: there never was one, or it is lost."""
        return number(await self._redis.get(self._key))

    async def transaction(self, change: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a change, again if another process changes the revision meanwhile; return its result.

        Args:
            change: gets the pipeline of the transaction.
        """
        return await self._redis.transaction(change, self._key, value_from_callable=True)

    async def is_lost(self, pipe: Any) -> bool:
        """Return whether Redis has lost the revision, and so the values, in a transaction."""
        return not number(await pipe.get(self._key))

    async def next(self, pipe: Any) -> int:
        """Return the next revision. The transaction has to `set` it, or a higher one."""
        # The first revision is the current time, so that it is new even after Redis lost its data.
        revision = number(await pipe.get(self._key))
        return revision + 1 if revision else time.time_ns() // 1000

    def set(self, pipe: Any, revision: int) -> None:
        """Queue the write of a revision in the transaction."""
        pipe.set(self._key, revision)


def number(packed: bytes | None) -> int:
    """Decode a number; return 0 if it is missing or unreadable."""
    return int(packed) if packed and packed.isdigit() and len(packed) <= NUMBER_DIGITS else 0
