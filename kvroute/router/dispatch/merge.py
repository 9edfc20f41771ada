"""The chunks of a call's prompts, which run in parallel, become one stream as they arrive."""

import asyncio
from collections.abc import Sequence

from kvroute.contract.generation import Chunk
from kvroute.router.dispatch.dispatcher import Generation

WAITING_CHUNKS = 64  # a bound; what comes beyond it is joined in the streams

Numbered = tuple[int, Chunk]  # number of the prompt in the call, its next chunk


class Merged:
    """All chunks of these generations. The first failure ends them all, and so does `close`."""

    def __init__(self, generations: Sequence[Generation]) -> None:
        self._generations = generations
        self._queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(WAITING_CHUNKS)
        self._tasks: list[asyncio.Task[None]] | None = None  # None: not begun
        self._unfinished = len(generations)

    async def next(self) -> Numbered | None:
        """None after the last one. ApiError when no replica can go on."""
        if len(self._generations) == 1:
            chunk = await self._generations[0].next()
            return None if chunk is None else (0, chunk)
        if self._tasks is None:
            numbered = enumerate(self._generations)
            self._tasks = [asyncio.create_task(self._drain(*each)) for each in numbered]
        while self._unfinished:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item is not None:
                return item
            self._unfinished -= 1
        return None

    async def close(self) -> None:
        """Ends all requests, complete or not."""
        for generation in self._generations:
            generation.close()
        for task in self._tasks or ():
            task.cancel()
        await asyncio.gather(*(self._tasks or ()), return_exceptions=True)

    async def _drain(self, number: int, generation: Generation) -> None:
        try:
            while (chunk := await generation.next()) is not None:
                await self._queue.put((number, chunk))
        except Exception as error:  # any error; the reader raises it
            await self._queue.put(error)
            return
        await self._queue.put(None)
