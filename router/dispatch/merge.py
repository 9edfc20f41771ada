"""Merges the streams of a call's prompts into one, in the order in which items arrive."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

# Number of items that are buffered. While the buffer is full, the streams are not read, and join
# the items that wait in them.
WAITING_ITEMS = 64

Item = TypeVar("Item")


class MergedStreams(Generic[Item]):
    """The items of several streams. When a stream fails, `next` raises its error.

    Args:
        streams: each of these functions returns the next item of a stream, or None after the last
            item.
    """

    def __init__(self, streams: Sequence[Callable[[], Awaitable[Item | None]]]) -> None:
        self._streams = streams
        self._queue: asyncio.Queue[tuple[int, Item] | Exception | None] = asyncio.Queue(
            WAITING_ITEMS
        )
        self._tasks: list[asyncio.Task[None]] | None = None  # None: no item was requested yet
        self._unfinished = len(streams)

    async def next(self) -> tuple[int, Item] | None:
        """Return the index of a stream and its next item; None when all streams have ended.

        Raises:
            Exception: a stream has raised it.
        """
        if len(self._streams) == 1:
            item = await self._streams[0]()
            return None if item is None else (0, item)
        if self._tasks is None:
            self._tasks = [
                asyncio.create_task(self._drain(index, stream))
                for index, stream in enumerate(self._streams)
            ]
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

    async def _drain(self, index: int, stream: Callable[[], Awaitable[Item | None]]) -> None:
        try:
            while (item := await stream()) is not None:
                await self._queue.put((index, item))
        except Exception as error:  # any error; `next` raises it
            await self._queue.put(error)
            return
        await self._queue.put(None)
