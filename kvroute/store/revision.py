"""Values in Redis with a revision: a number that is new after each change of them."""

import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, ClassVar, Generic, TypeVar

from kvroute.store.connection import ModelStore, with_timeout

NUMBER_DIGITS = 18  # maximum number of digits in a number; longer numbers are unreadable

T = TypeVar("T")


class RevisedStore(ModelStore, Generic[T]):
    """Values of one model of one cluster. All changes of them are transactions of this class."""

    NAME: ClassVar[str]  # name of the values in their key

    def __post_init__(self) -> None:
        super().__post_init__()
        self._values = f"{self._prefix}:{self.NAME}"  # the key of the values
        self._revision = f"{self._values}:revision"

    @with_timeout
    async def revision(self) -> int:
        """Return a number that is new after each change; 0: there never was one, or it is lost."""
        return number(await self._redis.get(self._revision))

    @with_timeout
    async def restore(self, values: T) -> None:
        """Write the values again if Redis has lost its data, that is, if it has no revision."""

        async def change(pipe: Any) -> None:
            if not number(await pipe.get(self._revision)):
                await self._write(pipe, values)

        await self._transaction(change)

    @abstractmethod
    async def _write(self, pipe: Any, values: T) -> None:
        """Queue the writes of values and of the next revision in the transaction."""

    async def _transaction(self, change: Callable[[Any], Awaitable[Any]]) -> Any:
        """Run a change, again if another process changes the revision meanwhile; return its result.

        Args:
            change: gets the pipeline of the transaction.
        """
        return await self._redis.transaction(change, self._revision, value_from_callable=True)

    async def _next_revision(self, pipe: Any) -> int:
        """Return the next revision. The transaction has to set it, or a higher one."""
        # The first revision is the current time, so that it is new even after Redis lost its data.
        revision = number(await pipe.get(self._revision))
        return revision + 1 if revision else time.time_ns() // 1000


def number(packed: bytes | None) -> int:
    """Decode a number; return 0 if it is missing or unreadable."""
    return int(packed) if packed and packed.isdigit() and len(packed) <= NUMBER_DIGITS else 0
