"""What an engine generates for a client that reads slowly waits in bounded memory.

Nothing can pause an engine's request, so where a client might leave too much unread, a task takes
it from the engine and counts it.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from kvroute.contract.generation import Chunk, GenerateRequest

WAITING_TOKENS = 262_144  # of one client's call, with the alternatives of its logprobs: some 50 MB
LEAST_TOKENS = 1024  # for each of its prompts, however many there are


class SlowReaderError(ValueError):
    """Too much waits for the client; the request has ended."""


def bounded(request: GenerateRequest, chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[Chunk]:
    """The chunks. SlowReaderError when too many wait for whoever reads this."""
    sampling = request.sampling
    alternatives = 0 if sampling.logprobs is None else 1 + sampling.logprobs
    limit = max(LEAST_TOKENS, WAITING_TOKENS // request.prompts)
    if sampling.n * sampling.max_tokens * (1 + alternatives) <= limit:
        return chunks
    return _counted(chunks, limit // (1 + alternatives))


async def _counted(chunks: AsyncGenerator[Chunk], limit: int) -> AsyncGenerator[Chunk]:
    """limit: tokens that may wait."""
    queue: asyncio.Queue[Chunk | BaseException | None] = asyncio.Queue()
    waiting = 0

    async def fill() -> None:
        nonlocal waiting
        try:
            async with contextlib.aclosing(chunks):
                async for chunk in chunks:
                    waiting += len(chunk.token_ids)
                    if waiting > limit:
                        raise SlowReaderError(
                            f"the client has not read {waiting} tokens; read faster, "
                            "or ask for fewer choices or logprobs"
                        )
                    queue.put_nowait(chunk)
        except Exception as error:  # any of the engine's; who reads raises it
            queue.put_nowait(error)
        else:
            queue.put_nowait(None)

    filling = asyncio.create_task(fill())
    try:
        while (item := await queue.get()) is not None:
            if isinstance(item, BaseException):
                raise item
            waiting -= len(item.token_ids)
            yield item
    finally:
        filling.cancel()
        await asyncio.wait([filling])
