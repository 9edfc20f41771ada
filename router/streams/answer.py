"""One call's prompts become one HTTP answer, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing

from fastapi import Response
from fastapi.responses import StreamingResponse

from replica.protocol import Sampling, TokenIds
from router.api.errors import ApiError
from router.api.responses import Reply
from router.api.sampling import SamplingRequest
from router.routing.trips import Asked
from router.streams.dispatch import Dispatcher, Generation
from router.streams.merge import merge


async def answer(
    dispatcher: Dispatcher,
    shape: type[Reply],
    body: SamplingRequest,
    prompts: Sequence[TokenIds],
    asked: Asked,
    *,
    model: str,
    max_model_len: int,
    begun: Callable[[Generation], None],
    receipt: Callable[[Generation], object] | None = None,
) -> Response:
    """Generates for every prompt. ApiError when one cannot be: then none of them runs on.

    begun: called with each generation once it has its first token. receipt: what to add to the
    answer for each of them.
    """
    samplings = [body.sampling(body.room(len(prompt), max_model_len)) for prompt in prompts]
    generations = await _begin(dispatcher, zip(prompts, samplings, strict=True), asked)
    for generation in generations:
        begun(generation)
    reply = shape(
        asked.lora or model,
        sum(map(len, prompts)),
        request_id=asked.request_id,
        prompts=len(prompts),
        n=body.n,
        logprobs=body.reported_logprobs() is not None,
        include_usage=body.include_usage,
        receipts=[receipt(generation) for generation in generations] if receipt else (),
    )
    headers = _headers(generations)
    if body.stream:
        events = _events(reply, generations)
        opening = await anext(events)  # a generator that has begun also ends: nothing runs on
        return StreamingResponse(
            _chain(opening, events), headers=headers, media_type="text/event-stream"
        )
    async with aclosing(merge(generations)) as chunks:
        async for prompt, chunk in chunks:
            reply.add(chunk, prompt)
    return Response(reply.whole(), headers=headers, media_type="application/json")


async def _begin(
    dispatcher: Dispatcher, prompts: Iterable[tuple[TokenIds, Sampling]], asked: Asked
) -> list[Generation]:
    """All prompts of one call under way, or none of them."""
    tasks = [
        asyncio.create_task(dispatcher.begin(prompt, sampling, asked))
        for prompt, sampling in prompts
    ]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:  # one cannot be, or the client has gone meanwhile
        for task in tasks:
            task.cancel()
        begun = await asyncio.gather(*tasks, return_exceptions=True)
        _close(result for result in begun if isinstance(result, Generation))
        raise


async def _events(reply: Reply, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """The stream's events; what fails after the first byte ends in an error event."""
    try:
        yield reply.opening()
        async with aclosing(merge(generations)) as chunks:
            async for prompt, chunk in chunks:
                yield reply.event(chunk, prompt)
    except ApiError as error:
        yield error.event()
        return
    finally:
        _close(generations)
    yield reply.closing()


async def _chain(opening: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield opening
    async for event in events:
        yield event


def _close(generations: Iterable[Generation]) -> None:
    for generation in generations:
        generation.close()


def _headers(generations: Iterable[Generation]) -> dict[str, str]:
    """Which replicas serve the call's prompts, and the hits that were counted on, in tokens."""
    return {
        "x-kvroute-replica": ",".join(generation.replica_id for generation in generations),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
    }
