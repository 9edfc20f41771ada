"""Values in Redis with a revision: a number that is new after each change of them.

A process that uses the values all the time follows them: it has a copy in memory.
"""

import asyncio
import math
import time
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import ClassVar, Generic, Protocol, TypeVar

from kvroute.store.connection import REDIS_ERRORS, ModelStore, Outage, SharedClock, with_timeout

POLL_S = 0.25  # seconds between two reads of the revision
RETRY_S = 0.5  # seconds between two attempts to reach Redis during an outage
NUMBER_DIGITS = 18  # maximum number of digits in a number; longer numbers are unreadable

T = TypeVar("T")
R = TypeVar("R")


class Transaction(Protocol):
    """Redis's pipeline in a transaction: it reads at once until `multi`, and then queues writes."""

    async def get(self, key: str) -> bytes | None: ...
    async def hget(self, key: str, field: str) -> bytes | None: ...
    async def hgetall(self, key: str) -> Mapping[bytes, bytes]: ...
    async def hkeys(self, key: str) -> Sequence[bytes]: ...
    async def smembers(self, key: str) -> set[bytes]: ...
    def multi(self) -> None: ...
    def set(self, key: str, value: int) -> object: ...
    def hset(self, key: str, field: str, value: bytes | int) -> object: ...
    def hdel(self, key: str, *fields: str | bytes) -> object: ...
    def hincrby(self, key: str, field: str, amount: int) -> object: ...
    def sadd(self, key: str, *members: str) -> object: ...
    def srem(self, key: str, *members: str) -> object: ...


class RevisedStore(ModelStore, Generic[T]):
    """Values of one model of one cluster. All changes of them are transactions of this class."""

    NAME: ClassVar[str]  # name of the values in their key

    def __post_init__(self) -> None:
        super().__post_init__()
        self._values = f"{self._prefix}:{self.NAME}"  # the key of the values
        self._revision = f"{self._values}:revision"
        self.clock = SharedClock()  # updated with each read of the revision

    @with_timeout
    async def revision(self) -> int:
        """Return a number that is new after each change; 0: there never was one, or it is lost."""
        pipeline = self._redis.pipeline(transaction=False)
        pipeline.get(self._revision)
        pipeline.time()
        revision, reading = await pipeline.execute(raise_on_error=False)
        if isinstance(revision, Exception):
            raise revision
        self.clock.update(reading)
        return number(revision)

    @abstractmethod
    def all(self) -> Awaitable[Sequence[T]]:
        """Return all values, the oldest first."""

    @with_timeout
    async def restore(self, values: Sequence[T]) -> None:
        """Write the values again if Redis has lost its data, that is, if it has no revision."""

        async def change(pipe: Transaction) -> None:
            if not number(await pipe.get(self._revision)):
                await self._write(pipe, values)

        await self._transaction(change)

    @abstractmethod
    async def _write(self, pipe: Transaction, values: Sequence[T]) -> None:
        """Queue the writes of values and of the next revision in the transaction."""

    async def _transaction(self, change: Callable[[Transaction], Awaitable[R]]) -> R:
        """Run a change, again if another process changes the revision; return its result."""
        run = self._redis.transaction
        result: R = await run(change, self._revision, value_from_callable=True)
        return result

    async def _begin_writes(self, pipe: Transaction, count: int = 1) -> int:
        """Let the transaction write from now on; return the next revision, the first of `count`."""
        # The first revision is the current time, so that it is new even after Redis lost its data.
        before = number(await pipe.get(self._revision))
        revision = before + 1 if before else time.time_ns() // 1000
        pipe.multi()
        pipe.set(self._revision, revision + count - 1)
        return revision


class Follower(Generic[T]):
    """A copy in memory of all values of a store.

    Args:
        store: the values in Redis.
        restores: what to do when Redis has lost the values. True: write them again, from the copy.
            False: keep the copy until another process has written them.
        on_change: called with the values, the oldest first, when they have changed.
    """

    def __init__(
        self,
        store: RevisedStore[T],
        *,
        restores: bool,
        on_change: Callable[[Sequence[T]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._restores = restores
        self._on_change = on_change
        self.values: Sequence[T] = ()  # as of the last read, the oldest first
        self.revision: int | None = None  # revision of these values; None: they were never read
        # Start of the latest read after which the copy had all values of Redis.
        self.complete_s = -math.inf
        self._reading = asyncio.Lock()
        self._began_s = -math.inf  # start of the latest attempt to read
        self._error: Exception | None = None  # why that attempt failed

    async def run(self, work: Callable[[], Awaitable[None]], outage: Outage) -> None:
        """Refresh the copy and then call `work`, again and again until cancelled."""
        while True:
            try:
                await self.refresh()
                await work()
                outage.end()
                await asyncio.sleep(POLL_S)
            except REDIS_ERRORS as error:
                outage.begin(error)
                await asyncio.sleep(RETRY_S)

    async def refresh(self) -> None:
        """Read the values if they have changed. Calls at the same time share one read.

        Raises:
            RedisError, OSError: Redis cannot be used. The copy stays as it is.
        """
        asked_s = time.monotonic()
        async with self._reading:
            if self._began_s < asked_s:
                self._error, began_s = None, time.monotonic()
                try:
                    await self._read(began_s)
                except REDIS_ERRORS as error:
                    self._error = error
                self._began_s = began_s
            if self._error is not None:
                raise self._error

    async def _read(self, began_s: float) -> None:
        revision = await self._store.revision()
        if not revision and self.values:
            if not self._restores:
                return
            await self._store.restore(self.values)
            revision = await self._store.revision()
        if revision != self.revision:
            self.values = await self._store.all()
            self.revision = revision
            self._on_change(self.values)
        if revision:
            self.complete_s = began_s


def number(packed: bytes | None) -> int:
    """Decode a number; return 0 if it is missing or unreadable."""
    return int(packed) if packed and packed.isdigit() and len(packed) <= NUMBER_DIGITS else 0
