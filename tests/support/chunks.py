"""Converts between an engine's `generate` and an asynchronous stream of chunks."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from kvroute.contract.generation import Chunk, Emit, Generate, GenerateRequest


async def collected(generate: Generate, request: GenerateRequest) -> list[Chunk]:
    chunks = list[Chunk]()
    await generate(request, chunks.append)
    return chunks


async def streamed(generate: Generate, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks that `generate` emits. Closing the generator aborts the request."""
    chunks = asyncio.Queue[Chunk | None]()
    task = asyncio.ensure_future(generate(request, chunks.put_nowait))
    task.add_done_callback(lambda _: chunks.put_nowait(None))
    try:
        while (chunk := await chunks.get()) is not None:
            yield chunk
        task.result()
    finally:
        task.cancel()
        await asyncio.wait([task])


def emitting(chunks_of: Callable[[GenerateRequest], AsyncGenerator[Chunk, None]]) -> Generate:
    async def generate(request: GenerateRequest, emit: Emit) -> None:
        async with aclosing(chunks_of(request)) as chunks:
            async for chunk in chunks:
                emit(chunk)

    return generate
