"""OpenAI's HTTP routes, and one that explains where a prompt would go."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.router.api.bodies import Bodies, BodyReader
from kvroute.router.api.calls import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    PASSED_ON,
    RESPONSES,
    Call,
    parse_any_request,
    parse_request,
)
from kvroute.router.api.request_id import request_id
from kvroute.router.api.schemas import ChatCompletionRequest, CompletionRequest, PrefixedRequest
from kvroute.router.serving.models import Models, Served

RECEIPT = "x-kvroute-receipt"  # header of a request that wants one
PREFIX = "x-kvroute-prefix"  # header with the name of a declared prefix

routes = APIRouter()


class Answers:
    """A route as plain ASGI: FastAPI's layers would cost each request, and each event, more CPU."""

    def __init__(self, path: str, schema: type[PrefixedRequest] | None = None) -> None:
        self.path = path
        self._schema = schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # as FastAPI's routes do, for the span's name
        request = Request(scope, receive)
        state = request.app.state
        parse = partial(parse_request, self.path, self._schema, state.models.simulated)
        response = await _respond(parse, request, state.models, state.bodies)
        await response(scope, receive, send)

    def route(self) -> Route:
        return Route(self.path, self, methods=["POST"])


routes.routes += [
    Answers(CHATS, ChatCompletionRequest).route(),
    Answers(COMPLETIONS, CompletionRequest).route(),
    *(Answers(path).route() for path in (RESPONSES, MESSAGES, *PASSED_ON)),
]


@routes.post("/v1/route")
async def route(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Where the prompts of this body would go now, and why; nothing runs."""
    body = await bodies.read(partial(parse_any_request, models.simulated), request)
    receipts = await models.named(body.model).explain(body)
    return JSONResponse({"object": "route", "router": models.router_id, "receipts": receipts})


@routes.get("/v1/models")
async def list_models(models: Served) -> Response:
    cards = [card for model in models.all for card in models.cards(model)]
    return JSONResponse({"object": "list", "data": cards})


@routes.get("/v1/models/{name:path}")
async def get_model(name: str, models: Served) -> Response:
    model = models.named(name)
    id_ = model.adapter(name) or model.name
    (card,) = (each for each in models.cards(model) if each["id"] == id_)
    return JSONResponse(card)


async def _respond(
    parse: Callable[[bytes], Call | PrefixedRequest],
    request: Request,
    models: Models,
    bodies: Bodies,
) -> Response:
    with _counting_refusals(request, models):
        body = await bodies.read(parse, request)
        request.state.model = model = models.named(body.model)
        headers, id_ = request.headers, request_id(request)
        with_receipts = headers.get(RECEIPT, "0") not in ("0", "")
        if isinstance(body, Call):
            prefix_name = headers.get(PREFIX)
            return await model.answer(
                body, request_id=id_, with_receipts=with_receipts, prefix_name=prefix_name
            )
        return await model.respond(body, request_id=id_, with_receipts=with_receipts)


@contextmanager
def _counting_refusals(request: Request, models: Models) -> Iterator[None]:
    """Counts an error that leaves the block, since the client gets it. An error that is raised
    before the model is known counts for the first model."""
    try:
        yield
    except Exception as error:
        getattr(request.state, "model", models.first).refused(error)
        raise
