"""One call's prompts become one HTTP response, whole or streamed."""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from fastapi import Response
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from kvroute.contract.generation import Chunk, Sampling, TokenIds
from kvroute.contract.http_call import HttpCall
from kvroute.router.api.errors import ApiError
from kvroute.router.api.responses import ChatReply, CompletionReply, Reply
from kvroute.router.api.sampling import SamplingRequest
from kvroute.router.api.schemas import ChatCompletionRequest
from kvroute.router.dispatch.dispatcher import Dispatcher, Generation
from kvroute.router.dispatch.merge import Merged
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
    asked = [(*each, None) for each in zip(prompts, samplings, strict=True)]
    generations = await begin_all(dispatcher, asked, context)
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
    headers = placement_headers(generations)
    if body.stream:
        return EventStream(reply, generations, headers)
    merged = Merged([generation.next for generation in generations])
    try:
        while item := await merged.next():
            reply.add(item[1], item[0])
    finally:
        await _end(merged, generations)
    return Response(reply.whole(), headers=headers, media_type="application/json")


class EventStream(StreamingResponse):
    """Server-sent events. What has come when it is time to write is one event."""

    def __init__(
        self, reply: Reply, generations: Sequence[Generation], headers: Mapping[str, str]
    ) -> None:
        super().__init__((), headers=headers, media_type="text/event-stream")
        self._reply = reply
        self._generations = generations
        self._merged = Merged([generation.next for generation in generations])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await _end(self._merged, self._generations)

    async def stream_response(self, send: Send) -> None:
        """A failure after the first byte becomes an event. The first event goes out together with
        the opening, and the last one with the closing."""
        reply, merged = self._reply, self._merged
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        body = reply.opening()
        try:
            while item := await merged.next():
                body += reply.event(item[1], item[0])
                if reply.is_complete:
                    break
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            body += reply.closing()
        except ApiError as error:
            body += error.event()
        await send({"type": "http.response.body", "body": body, "more_body": False})


def _shape(body: SamplingRequest) -> type[Reply]:
    return ChatReply if isinstance(body, ChatCompletionRequest) else CompletionReply


async def begin_all(
    dispatcher: Dispatcher,
    prompts: Iterable[tuple[TokenIds, Sampling, HttpCall | None]],
    context: RequestContext,
) -> list[Generation]:
    """Starts all prompts of one call, or none of them."""
    tasks: list[asyncio.Task[Generation]] = []
    try:
        for prompt, sampling, call in prompts:
            begin = dispatcher.begin_in_turn if tasks else dispatcher.begin
            tasks.append(asyncio.create_task(begin(prompt, sampling, context, call)))
        return await asyncio.gather(*tasks)
    except BaseException:  # one cannot run, or the client has disconnected
        for task in tasks:
            task.cancel()
        begun = await asyncio.gather(*tasks, return_exceptions=True)
        close_all(result for result in begun if isinstance(result, Generation))
        raise


def close_all(generations: Iterable[Generation]) -> None:
    """Ends all requests, complete or not."""
    for generation in generations:
        generation.close()


async def _end(merged: Merged[Chunk], generations: Iterable[Generation]) -> None:
    close_all(generations)
    await merged.close()


def placement_headers(generations: Sequence[Generation]) -> dict[str, str]:
    """Which replicas serve the call's prompts, each once, and the expected cache hits, in tokens.
    Load balancers refuse a response whose headers take more than some kilobytes."""
    replicas = dict.fromkeys(generation.replica_id for generation in generations)
    return {
        "x-kvroute-replica": ",".join(islice(replicas, SHOWN_REPLICAS)),
        "x-kvroute-expected-tokens": str(sum(g.expected_tokens for g in generations)),
    }
