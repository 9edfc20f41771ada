"""OpenAI's HTTP routes, and one that explains where a prompt would go."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.router.api.access import caller_of
from kvroute.router.api.bodies import Bodies, BodyReader
from kvroute.router.api.calls import (
    CHATS,
    COMPLETIONS,
    MESSAGES,
    PASSED_ON,
    RESPONSES,
    parse_any,
    parse_call,
)
from kvroute.router.api.request_id import request_id
from kvroute.router.dispatch.relay import whole_response
from kvroute.router.serving.calls import RefusedCallError
from kvroute.router.serving.models import Models, Served

RECEIPT = "x-kvroute-receipt"  # header of a request that wants one
PREFIX = "x-kvroute-prefix"  # header with the name of a declared prefix

routes = APIRouter()


class Answers:
    """A route as plain ASGI: FastAPI's layers would cost each request, and each event, more CPU."""

    def __init__(self, path: str) -> None:
        self.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # as FastAPI's routes do, for the span's name
        request = Request(scope, receive)
        response = await _respond(self.path, request)
        await response(scope, receive, send)

    def route(self) -> Route:
        return Route(self.path, self, methods=["POST"])


routes.routes += [
    Answers(path).route() for path in (CHATS, COMPLETIONS, RESPONSES, MESSAGES, *PASSED_ON)
]


@routes.post("/v1/route")
async def route(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Where the prompts of this body would go now, and why; nothing runs."""
    call = (await bodies.read(parse_any, request)).asked_by(caller_of(request))
    try:
        receipts = await models.named(call.model).explain(call)
    except RefusedCallError as error:
        return whole_response(error.refusal)
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


async def _respond(path: str, request: Request) -> Response:
    models: Models = request.app.state.models
    bodies: Bodies = request.app.state.bodies
    with _counting_refusals(request, models):
        call = await bodies.read(partial(parse_call, path), request)
        call = call.asked_by(caller_of(request))
        request.state.model = model = models.named(call.model)
        return await model.answer(
            call,
            request_id=request_id(request),
            with_receipts=request.headers.get(RECEIPT, "0") not in ("0", ""),
            prefix_name=request.headers.get(PREFIX),
        )


@contextmanager
def _counting_refusals(request: Request, models: Models) -> Iterator[None]:
    """Counts an error that leaves the block, since the client gets it. An error that is raised
    before the model is known counts for the first model."""
    try:
        yield
    except Exception as error:
        getattr(request.state, "model", models.first).refused(error)
        raise
