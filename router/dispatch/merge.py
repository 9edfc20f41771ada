"""The streams of a call's prompts, which run in parallel, become one stream as they arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

WAITING_ITEMS = 64  # a bound; what comes beyond it is joined in the streams

Item = TypeVar("Item")


class Merged(Generic[Item]):
    """All items of these streams. The first failure ends them all, and so does `close`.

    streams: each returns its next item, or None after the last one.
    """

    def __init__(self, streams: Sequence[Callable[[], Awaitable[Item | None]]]) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(
            WAITING_ITEMS
        )
        self._tasks: list[asyncio.Task[None]] | None = None  # None: not begun
        self._unfinished = len(streams)

    async def next(self) -> tuple[int, Item] | None:
        """Return the number of a stream and its next item; None after the last one.

        Raises:
            Exception: what a stream raises.
        """
        if len(self._streams) == 1:
            item = await self._streams[0]()
            return None if item is None else (0, item)
        if self._tasks is None:
            numbered = enumerate(self._streams)
            self._tasks = [asyncio.create_task(self._drain(*each)) for each in numbered]
        while self._unfinished:
            queued = await self._queue.get()
            if isinstance(queued, Exception):
                raise queued
            if queued is not None:
                return queued
            self._unfinished -= 1
        return None

    async def close(self) -> None:
        """Stop reading the streams."""
        for task in self._tasks or ():
            task.cancel()
        await asyncio.gather(*(self._tasks or ()), return_exceptions=True)

    async def _drain(self, number: int, stream: Callable[[], Awaitable[Item | None]]) -> None:
        try:
            while (item := await stream()) is not None:
                await self._queue.put((number, item))
        except Exception as error:  # any error; the reader raises it
            await self._queue.put(error)
            return
        await self._queue.put(None)
