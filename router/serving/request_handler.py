"""The stages of a request, and who calls them.

stage      module                    what it does
parse      endpoints/openai_routes   reads the body into a Call, the headers into a RequestContext
expand     serving/assembly          adds what features have stored for the call, and tokens that a
                                     feature puts before the prompts
render     serving/rendering         turns the prompts into token ids, here or in a replica
dispatch   dispatch/dispatcher       for each prompt: place, admit and send, until a replica answers
place      placement/fleet           ranks the replicas
admit      dispatch/admission        checks limits, features and queue; a prompt that had to wait is
                                     placed again
send       connections/links         finds the connection to the replica, and sends the request

The route parses a call before it calls RequestHandler, which expands and renders it. The module
that makes the response, serving/responding, starts the dispatch of each prompt. The dispatcher
calls place, admit and send.
"""

import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Response
from msgspec.structs import replace

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import TokenIds
from kvroute.features.expanded import Expanded
from kvroute.features.own_methods import own_methods
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import STATELESS_ROUTES, Call
from kvroute.router.api.fair_lock import one_by_one
from kvroute.router.api.scoring import Scoring, completion
from kvroute.router.dispatch.generation import Generation, StartPrompt
from kvroute.router.dispatch.relay import complete_response
from kvroute.router.observability import request_spans
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.receipts import receipt
from kvroute.router.prompts.image_affinity import ImageAffinity
from kvroute.router.prompts.tokenizer import Prompts
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.forwarding import forward
from kvroute.router.serving.rendering import RefusedCallError, RenderedCall, Renderer
from kvroute.router.serving.responding import written
from kvroute.router.sessions.breaks import Break

# Generates the response to a call whose prompt the core cannot read, such as a recording.
Generating = Callable[[Call, RequestContext, Parts], Awaitable[Response]]


class RequestHandler:
    """Answers the requests for one model in one router."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._policy = parts.settings.policy
        self._changes = own_methods(parts.features, RouterFeature.change)
        self._image_affinity = ImageAffinity()
        self._renderer = Renderer(
            parts.questions,
            parts.fleet,
            parts.tokenizer,
            self._image_affinity,
            max_model_len=parts.max_model_len,
        )

    async def answer(
        self, call: Call, context: RequestContext, generate: Generating | None = None
    ) -> Response:
        """Return the response to a call that a replica's HTTP application answers.

        Args:
            generate: generates the response. None: `_generate` generates it, or `forward` does if
                the route does not use the KV cache.

        Raises:
            ApiError: the call cannot be answered.
        """
        try:
            if generate is not None:
                response = await generate(call, context, self._parts)
            elif call.path in STATELESS_ROUTES:
                response = await forward(call, context.request_id, self._parts, self._renderer)
            else:
                response = await self._generate(call, context)
        except RefusedCallError as error:
            response = complete_response(error.refusal, path=call.path)
        if response.status_code >= 400:
            context.entry.refund(time.monotonic())
            self._parts.telemetry.refused_by_engine()
        return response

    async def _generate(self, call: Call, context: RequestContext) -> Response:
        """Answer a call for which replicas generate tokens: expand, render and dispatch it."""
        parts = self._parts
        parts.holding.check(context.urgency)
        expanded = await parts.expand(call)
        with request_spans.step("tokenise"):
            rendered = await self._renderer.render(expanded.call, expanded.opening)
        context.entry.add_prompt_tokens(rendered.tokens, time.monotonic())
        context = self._with_prompts(context, expanded, rendered)
        starters = (
            partial(self._start, start, context, expanded, rendered)
            for start in parts.dispatcher.starters(rendered.prompts(), context)
        )
        response = await written(
            expanded.call, starters, prompts=context.prompts, policy=self._policy
        )
        return await expanded.finish(response) if expanded.finish else response

    async def explain(self, call: Call, context: RequestContext) -> list[dict[str, Any]]:
        """Return where each prompt of a call would be sent now, and why. Nothing is generated.

        Raises:
            ApiError: the call would be refused.
            RefusedCallError: a replica refuses the body.
        """
        expanded = await self._parts.expand(call)
        call = expanded.call
        rendered = await self._renderer.render(call, expanded.opening)
        broken = self._broken(expanded, rendered, context.variant, is_sent=False)
        media = rendered.placed_media()
        receipts = []
        async for prompt in one_by_one(rendered.token_ids):
            running, now_s = self._parts.liveness.trusted(), time.monotonic()
            shared_tokens = self._parts.dispatcher.shared_tokens(prompt, context.namespace, media)
            scope = Scope(context.variant, context.namespace, shared_tokens)
            placement = self._parts.fleet.place(prompt, running, now_s, scope, media)
            why = self._parts.fleet.recognise(placement, context).evicted_why
            receipts.append(receipt(placement, policy=self._policy, broken=broken, evicted_why=why))
        return receipts

    async def check(self, call: Call) -> None:
        """Raise the error with which the call would be refused. Nothing is generated.

        Raises:
            ApiError: the router would refuse the call.
            RefusedCallError: a replica would refuse the body.
        """
        expanded = await self._parts.expand(call)
        await self._renderer.render(expanded.call, expanded.opening)

    async def scoring(self, scoring: Scoring, raw: bytes) -> Call:
        """Return the call of /v1/completions from whose response the scores are computed.

        Args:
            scoring: the request.
            raw: the request's body.

        Raises:
            ApiError: the request is not valid.
        """
        length = self._parts.max_model_len()
        prompts = await scored_prompts(scoring, self._parts.tokenizer, max_model_len=length)
        return completion(scoring, raw, prompts)

    def _with_prompts(
        self, context: RequestContext, expanded: Expanded, rendered: RenderedCall
    ) -> RequestContext:
        """Return the context with the facts about the rendered prompts."""
        opening = expanded.opening
        return replace(
            context,
            ready_s=time.monotonic(),
            prompts=len(rendered.token_ids),
            kept_tokens=opening.kept_tokens if opening and expanded.call.reads_cache else 0,
            broken=self._broken(expanded, rendered, context.variant, is_sent=True),
            media=rendered.placed_media(),
        )

    def _broken(
        self, expanded: Expanded, rendered: RenderedCall, variant: str, *, is_sent: bool
    ) -> Break | None:
        """Return where the prompt differs from the chat's earlier prompt; see `change`."""
        found = (change(expanded, rendered, variant, is_sent=is_sent) for change in self._changes)
        return next(filter(None, found), None)

    async def _start(
        self,
        start: StartPrompt,
        context: RequestContext,
        expanded: Expanded,
        rendered: RenderedCall,
    ) -> Generation:
        """Start a prompt, and record the replica of its image.

        At the prompt's first token, inform the feature of the opening, the features that follow
        first tokens, and the gate.
        """
        generation = await start()
        if rendered.image is not None:
            self._image_affinity.record(rendered.image, generation.replica_id)
        if generation.is_refused:
            return generation
        if expanded.opening is not None:
            expanded.opening.first_token(generation)
        for started in self._parts.started:
            started(generation)
        new_tokens = max(0, len(generation.token_ids) - generation.cached_tokens)
        context.entry.charge_computed(generation.request_id, new_tokens, time.monotonic())
        return generation


async def scored_prompts(
    scoring: Scoring, tokenizer: Prompts, *, max_model_len: int
) -> list[TokenIds]:
    """Return one prompt per item: query and item, or item and query.

    As in vLLM, the end of a prompt that is too long is cut off.
    """
    texts = [scoring.query] if isinstance(scoring.query, str) else []
    longest = max_model_len - 1  # leaves space for the one token that the engine generates
    (query,) = await tokenizer.encode(texts, special=scoring.add_special_tokens) or [
        _ids(scoring.query)
    ]
    items = await _items(scoring.items, tokenizer)
    pairs = ((item, query) if scoring.item_first else (query, item) for item in items)
    return [
        np.concatenate([first[:longest], second[:longest]])[:longest] for first, second in pairs
    ]


async def _items(items: Sequence[str] | Sequence[list[int]], tokenizer: Prompts) -> list[TokenIds]:
    texts = [item for item in items if isinstance(item, str)]
    return await tokenizer.encode(texts) if texts else [_ids(item) for item in items]


def _ids(token_ids: str | Sequence[int]) -> TokenIds:
    return np.array(token_ids, np.uint32)
