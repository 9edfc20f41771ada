"""One call's prompts become one HTTP response, whole or streamed."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing
from itertools import islice

from fastapi import Response
from fastapi.responses import StreamingResponse

from kvroute.contract.generation import Sampling, TokenIds
from kvroute.router.api.errors import ApiError
from kvroute.router.api.responses import ChatReply, CompletionReply, Reply
from kvroute.router.api.sampling import SamplingRequest
from kvroute.router.api.schemas import ChatCompletionRequest
from kvroute.router.dispatch.dispatcher import Dispatcher, Generation
from kvroute.router.dispatch.merge import merge
from kvroute.router.routing.attempts import RequestContext

SHOWN_REPLICAS = 32  # in a header


async def respond(
    dispatcher: Dispatcher,
    body: SamplingRequest,
    prompts: Sequence[TokenIds],
    context: RequestContext,
    *,
    model: str,
    max_model_len: int,
    begun: Callable[[Generation], None],
    receipt: Callable[[Generation], object] | None = None,
) -> Response:
    """Generates for every prompt. ApiError when one of them cannot run; then all are cancelled.

    begun: called with each generation when it has its first token. receipt: returns what to add to
    the response for each generation.
    """
    samplings = [body.sampling(body.room(len(prompt), max_model_len)) for prompt in prompts]
    generations = await _begin(dispatcher, zip(prompts, samplings, strict=True), context)
    for generation in generations:
        begun(generation)
    reply = _shape(body)(
        context.lora or model,
        sum(map(len, prompts)),
        request_id=context.request_id,
        prompts=len(prompts),
        n=body.n,
        logprobs=body.reported_logprobs() is not None,
        include_usage=body.include_usage,
        receipts=[receipt(generation) for generation in generations] if receipt else (),
    )
    headers = _headers(generations)
    if body.stream:
        events = _events(reply, generations)
        opening = await anext(events)  # a started generator also runs its cleanup
        return StreamingResponse(
            _chain(opening, events), headers=headers, media_type="text/event-stream"
        )
    async with aclosing(merge(generations)) as chunks:
        async for prompt, chunk in chunks:
            reply.add(chunk, prompt)
    return Response(reply.whole(), headers=headers, media_type="application/json")


def _shape(body: SamplingRequest) -> type[Reply]:
    return ChatReply if isinstance(body, ChatCompletionRequest) else CompletionReply


async def _begin(
    dispatcher: Dispatcher, prompts: Iterable[tuple[TokenIds, Sampling]], context: RequestContext
) -> list[Generation]:
    """Starts all prompts of one call, or none of them."""
    tasks: list[asyncio.Task[Generation]] = []
    try:
        for prompt, sampling in prompts:
            begin = dispatcher.begin_in_turn if tasks else dispatcher.begin
            tasks.append(asyncio.create_task(begin(prompt, sampling, context)))
        return await asyncio.gather(*tasks)
    except BaseException:  # one cannot run, or the client has disconnected
        for task in tasks:
            task.cancel()
        begun = await asyncio.gather(*tasks, return_exceptions=True)
        _close(result for result in begun if isinstance(result, Generation))
        raise


async def _events(reply: Reply, generations: Sequence[Generation]) -> AsyncGenerator[bytes, None]:
    """The stream's events; a failure after the first byte becomes an error event."""
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


def _headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Which replicas serve the call's prompts, each once, and the expected cache hits, in tokens.
    Load balancers refuse a response whose headers take more than some kilobytes."""
    replicas = dict.fromkeys(generation.replica_id for generation in generations)
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
    }
