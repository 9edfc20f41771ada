"""Reads of Redis that many clients wait for at the same time, each of which runs once."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Generic, TypeVar

Result = TypeVar("Result")


class SharedReads(Generic[Result]):
    """Reads that run now, by their names. A second reader waits for the read of the first one.

    A read ends by itself, since each call to Redis has a time limit.
    """

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[Result]] = {}

    async def result(self, name: Hashable, read: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of a read, which begins now unless one with this name runs.

        A reader that is cancelled does not end the read, since others may wait for it.

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
