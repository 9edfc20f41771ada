"""OpenAI's routes: chats, completions and models; beside them, where a prompt would go."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse

from replica.kvindex.prefixes import Prefix
from replica.protocol import TokenIds
from router.api.parsing import is_chat, parse, read_body
from router.api.request_id import request_id
from router.api.responses import ChatReply, CompletionReply, Reply
from router.api.schemas import ChatCompletionRequest, CompletionRequest, PrefixedRequest
from router.insight import tracing
from router.models import Models, Served
from router.parts import Parts
from router.routing.receipts import receipt
from router.routing.trips import Asked
from router.streams.answer import answer
from router.streams.dispatch import Generation

RECEIPT = "x-kvroute-receipt"  # header of a request that wants one

routes = APIRouter()


@dataclass(frozen=True, slots=True)
class Call:
    """A client's, read."""

    parts: Parts  # of the model that answers
    body: PrefixedRequest
    prompts: list[TokenIds]
    prefix: Prefix | None  # that the prompts begin with

    @property
    def lora(self) -> str:
        """The LoRA adapter that answers; empty: the model itself."""
        return self.parts.lora(self.body.model) or ""


@routes.post("/v1/chat/completions")
async def chat(request: Request, models: Served) -> Response:
    with _counting_refusals(request, models):
        raw = await read_body(request, limit_mb=models.settings.max_body_mb)
        return await _answer(ChatReply, request, await _chat(request, models, raw))


@routes.post("/v1/completions")
async def completions(request: Request, models: Served) -> Response:
    with _counting_refusals(request, models):
        raw = await read_body(request, limit_mb=models.settings.max_body_mb)
        return await _answer(CompletionReply, request, await _completion(request, models, raw))


@routes.post("/v1/route")
async def route(request: Request, models: Served) -> Response:
    """Where the prompts of this body would go now, and why; nothing runs."""
    raw = await read_body(request, limit_mb=models.settings.max_body_mb)
    call = await (_chat if is_chat(raw) else _completion)(request, models, raw)
    fleet, salt = call.parts.fleet, call.body.cache_salt
    running, now_s = call.parts.watch.trusted(), time.monotonic()
    placements = [fleet.place(each, salt, running, now_s, call.lora) for each in call.prompts]
    receipts = [receipt(each, policy=models.settings.policy) for each in placements]
    return JSONResponse({"object": "route", "router": models.router_id, "receipts": receipts})


@routes.get("/v1/models")
async def list_models(models: Served) -> Response:
    cards = [card for parts in models.all for card in models.cards(parts)]
    return JSONResponse({"object": "list", "data": cards})


@routes.get("/v1/models/{name:path}")
async def get_model(name: str, models: Served) -> Response:
    parts = models.named(name)
    id_ = parts.lora(name) or parts.model
    (card,) = (each for each in models.cards(parts) if each["id"] == id_)
    return JSONResponse(card)


@contextmanager
def _counting_refusals(request: Request, models: Models) -> Iterator[None]:
    """An error that leaves the block is what a client gets. One that came before its model was
    known counts for the first model."""
    try:
        yield
    except Exception as error:
        getattr(request.state, "parts", models.first).refused(error)
        raise


async def _chat(request: Request, models: Models, raw: bytes) -> Call:
    body = parse(ChatCompletionRequest, raw)
    parts, prefix = await _meant(request, models, body)
    limit = parts.max_model_len
    with tracing.step("tokenise"):
        prompt = await parts.prefixes.joint.chat(body.messages, prefix, max_model_len=limit)
    return Call(parts, body, [prompt], prefix)


async def _completion(request: Request, models: Models, raw: bytes) -> Call:
    body = parse(CompletionRequest, raw)
    parts, prefix = await _meant(request, models, body)
    limit = parts.max_model_len
    with tracing.step("tokenise"):
        prompts = [
            await parts.prefixes.joint.completion(prompt, prefix, max_model_len=limit)
            for prompt in body.prompts()
        ]
    return Call(parts, body, prompts, prefix)


async def _meant(
    request: Request, models: Models, body: PrefixedRequest
) -> tuple[Parts, Prefix | None]:
    """The model that the body names, and the prefix to go on from. From now on the request's state
    has the model's parts."""
    request.state.parts = parts = models.named(body.model)
    named = body.prefix()
    return parts, await parts.prefixes.catalogue.named(*named) if named else None


async def _answer(shape: type[Reply], request: Request, call: Call) -> Response:
    parts, body, prefix = call.parts, call.body, call.prefix
    asked = Asked(
        time.monotonic(),
        request_id(request),
        choices=body.n,
        namespace=body.cache_salt,
        lora=call.lora,
        named_tokens=parts.prefixes.named_tokens(prefix),
    )

    def begun(generation: Generation) -> None:
        parts.prefixes.count(generation, prefix, is_apart=bool(asked.namespace or asked.lora))

    def told(generation: Generation) -> dict[str, Any]:
        return _receipt(generation, parts.settings.policy)

    return await answer(
        parts.dispatcher,
        shape,
        body,
        call.prompts,
        asked,
        model=parts.model,
        max_model_len=parts.max_model_len,
        begun=begun,
        receipt=told if request.headers.get(RECEIPT, "0") not in ("0", "") else None,
    )


def _receipt(generation: Generation, policy: str) -> dict[str, Any]:
    """Of a prompt that is being answered."""
    return receipt(generation.placement, policy=policy) | {
        "request_id": generation.request_id,
        "replica": generation.replica_id,
        "expected_tokens": generation.expected_tokens,
        "cached_tokens": generation.cached_tokens,
    }
