"""Lets many clients that need the same value from Redis wait for one read."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SharedReads(Generic[Result]):
    """The reads that run now, by name. A client that needs a value waits for a running read of it.

    Each read ends by itself, since each call to Redis has a time limit.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[Result]] = {}

    async def result(self, name: Hashable, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of the read with this name, which begins now unless it runs already.

        If the caller is cancelled, the read goes on, since others may wait for it.

        Raises:
            Exception: the read has failed.
        """
        running = self._running.get(name)
        if running is None or running.done():  # an ended one stays until its callback runs
            running = self._running[name] = asyncio.ensure_future(read())
            running.add_done_callback(partial(self._forget, name))
        return await asyncio.shield(running)

    def _forget(self, name: Hashable, ended: "asyncio.Future[Result]") -> None:
        if self._running.get(name) is ended:
            del self._running[name]
        if not ended.cancelled():
            ended.exception()  # its readers get it; if all have left, nobody needs it
