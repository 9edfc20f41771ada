"""OpenAI's HTTP routes, and one that explains where a prompt would go."""

from collections.abc import Iterator
from contextlib import contextmanager

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.router.api.bodies import Bodies, BodyReader
from kvroute.router.api.request_id import request_id
from kvroute.router.api.schemas import ChatCompletionRequest, CompletionRequest, PrefixedRequest
from kvroute.router.serving.models import Models, Served

RECEIPT = "x-kvroute-receipt"  # header of a request that wants one

routes = APIRouter()


class Answers:
    """A route as plain ASGI: FastAPI's layers would cost each request, and each event, more CPU."""

    def __init__(self, path: str, schema: type[PrefixedRequest]) -> None:
        self.path = path
        self._schema = schema

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # as FastAPI's routes do, for the span's name
        request = Request(scope, receive)
        state = request.app.state
        response = await _respond(self._schema, request, state.models, state.bodies)
        await response(scope, receive, send)

    def route(self) -> Route:
        return Route(self.path, self, methods=["POST"])


routes.routes += [
    Answers("/v1/chat/completions", ChatCompletionRequest).route(),
    Answers("/v1/completions", CompletionRequest).route(),
]


@routes.post("/v1/route")
async def route(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Where the prompts of this body would go now, and why; nothing runs."""
    body = await bodies.parsed_as_either(request)
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
    schema: type[PrefixedRequest], request: Request, models: Models, bodies: Bodies
) -> Response:
    with _counting_refusals(request, models):
        body = await bodies.parsed(schema, request)
        request.state.model = model = models.named(body.model)
        with_receipts = request.headers.get(RECEIPT, "0") not in ("0", "")
        return await model.respond(
            body, request_id=request_id(request), with_receipts=with_receipts
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
