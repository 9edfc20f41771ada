"""The chunks of a call's prompts, which run in parallel, become one stream as they arrive."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

from kvroute.contract.generation import Chunk
from kvroute.router.dispatch.dispatcher import Generation

WAITING_CHUNKS = 64  # a bound, so a slow client slows the engines' streams and fills no memory


async def merge(generations: Sequence[Generation]) -> AsyncGenerator[tuple[int, Chunk], None]:
    """(prompt number, chunk) of all generations; the first failure ends them all."""
    if len(generations) == 1:
        async for chunk in generations[0].chunks():
            yield 0, chunk
        return
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None] = asyncio.Queue(WAITING_CHUNKS)
    tasks = [
        asyncio.create_task(_drain(number, generation, queue))
        for number, generation in enumerate(generations)
    ]
    try:
        unfinished = len(tasks)
        while unfinished:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                unfinished -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _drain(
    number: int,
    generation: Generation,
    queue: asyncio.Queue[tuple[int, Chunk] | BaseException | None],
) -> None:
    try:
        async for chunk in generation.chunks():
            await queue.put((number, chunk))
    except Exception as error:  # any error; the reader raises it
        await queue.put(error)
        return
    finally:
        generation.close()  # also when it was cancelled before its first step
    await queue.put(None)
