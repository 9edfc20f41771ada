"""The HTTP routes that replicas answer, /v1/models, and /v1/route.

/v1/route explains where a prompt would be sent.
"""

import logging
import time
from contextlib import ExitStack
from functools import partial

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from msgspec.json import encode
from msgspec.structs import replace
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from kvroute.blocks.variants import name_of
from kvroute.features import HEADERS
from kvroute.features.gate import Entry
from kvroute.router.api.bodies import Bodies, BodyReader
from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
    STATELESS_ROUTES,
    Call,
    parse_any,
    parse_call,
    parse_invocation,
)
from kvroute.router.api.chat_list import CHAT_BATCH, parse_chat_batch
from kvroute.router.api.errors import ANTHROPIC_VERSION, JSON, ApiError
from kvroute.router.api.json_members import members
from kvroute.router.api.load_report import FORMAT_HEADER, REPORTING, report_headers
from kvroute.router.api.parsing import as_utf8
from kvroute.router.api.scoring import SCORING, parse_scoring, scores
from kvroute.router.api.sessions import hints_of
from kvroute.router.api.urgency import urgency_of
from kvroute.router.dispatch.chat_batch import run_together
from kvroute.router.dispatch.relay import complete_response
from kvroute.router.endpoints import anthropic_models
from kvroute.router.endpoints.signs_of_life import SignsOfLife, keep_alive_s
from kvroute.router.history.readable import header_of, left_out, say_left_out
from kvroute.router.middleware.caller_check import (
    INTERNAL_CALLER,
    at_gate,
    caller_of,
    counting_refusals,
)
from kvroute.router.middleware.request_id import request_id
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.serving.models import Models, Served
from kvroute.router.serving.rendering import RefusedCallError
from kvroute.router.serving.request_handler import Generating

log = logging.getLogger("kvroute.ingress")

# Header that requests receipts in the response: they explain where each prompt was sent.
RECEIPT = "x-kvroute-receipt"

routes = APIRouter()


class AnsweredRoute:
    """A route as a plain ASGI application.

    FastAPI's layers would take CPU time for each request and each event of a stream.
    """

    def __init__(self, path: str) -> None:
        self.path = path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["route"] = self  # tracing names the request's span after the path of this object
        request = Request(scope, receive)
        # A request of this process to itself has no connection that somebody could close.
        every_s = 0.0 if INTERNAL_CALLER in scope else keep_alive_s(request)
        signs = SignsOfLife(send, every_s)
        try:
            # Objects that features need until the end of the request are closed with this stack.
            with at_gate(request) as entry, ExitStack() as request.state.kept:
                request.state.entry = entry
                try:
                    with counting_refusals(request):
                        response = await self.respond(request, entry, signs)
                finally:
                    await signs.end()
                response.headers.update(entry.headers(time.monotonic()))
                if not signs.has_started:
                    await response(scope, receive, send)
                elif response.status_code >= 400:
                    await signs.refused(response)
                else:
                    await response(scope, receive, signs.send)
        except Exception as error:
            if not signs.has_started:
                raise
            await signs.failed(error if isinstance(error, ApiError) else failure(request, error))

    async def respond(self, request: Request, entry: Entry, signs: SignsOfLife) -> Response:
        """Read the body, and return the response to it."""
        bodies: Bodies = request.app.state.bodies
        if self.path == SCORING:
            return await _score(request, entry)
        if self.path == CHAT_BATCH:
            calls, id_ = await bodies.read(parse_chat_batch, request), request_id(request)
            answers = (
                answer(call, request, entry, id_=f"{id_}-{index}", is_first=index == 0)
                for index, call in enumerate(calls)
            )
            return await run_together(answers, id_=id_)
        parse = parse_invocation if self.path == INVOCATIONS else partial(parse_call, self.path)
        call = await bodies.read(parse, request)
        return await answer(call, request, entry, id_=request_id(request), signs=signs)

    def route(self) -> Route:
        """Return the route for the application's list of routes."""
        return Route(self.path, self, methods=["POST"])


routes.routes += [
    AnsweredRoute(path).route()
    for path in (
        CHAT_COMPLETIONS,
        CHAT_BATCH,
        COMPLETIONS,
        RESPONSES,
        MESSAGES,
        SCORING,
        *STATELESS_ROUTES,
    )
]


def failure(request: Request, error: Exception) -> ApiError:
    """Log an error that nobody expected, and return what the client is told."""
    log.error("%s %s failed", request.method, request.url.path, exc_info=error)
    return ApiError(
        500,
        f"the router failed to answer; its log has the reason, at request {request_id(request)}",
    )


@routes.post("/v1/route")
async def route(request: Request, models: Served, bodies: BodyReader) -> Response:
    """Return where the prompts of this body would be sent now, and why. Nothing is generated."""
    with at_gate(request) as entry:
        call = _with_headers(await bodies.read(parse_any, request), request)
        try:
            model = await models.find(call.model, call.caller)
            hints = hints_of(request.headers, call, model.promises)
            variant = model.variant(call.model, call.caller.tenant) or ""
            context = RequestContext(namespace=call.cache_salt, variant=variant, hints=hints)
            with ExitStack() as kept:
                call = model.with_data(replace(call, variant=variant), kept)
                receipts = await model.requests.explain(call, context)
        except RefusedCallError as error:
            return complete_response(error.refusal, path=call.path)
    body = {"object": "route", "router": models.router_id, "receipts": receipts}
    response = Response(encode(body), media_type=JSON)
    response.headers.update(entry.headers(time.monotonic()))
    return response


@routes.get("/v1/models")
async def list_models(request: Request, models: Served) -> Response:
    """Return the models and adapters that the client may use, in the form of its API."""
    caller = caller_of(request)
    cards = [card for model in models.all for card in models.cards(model, caller)]
    if ANTHROPIC_VERSION in request.headers:
        return JSONResponse(anthropic_models.page(cards, request.query_params))
    return JSONResponse({"object": "list", "data": cards})


@routes.get("/v1/models/{name:path}")
async def get_model(name: str, request: Request, models: Served) -> Response:
    """Return one model or adapter."""
    caller = caller_of(request)
    model = await models.find(name, caller)
    id_ = name_of(model.variant(name, caller.tenant) or model.name)
    (card,) = (card for card in models.cards(model, caller) if card["id"] == id_)
    is_anthropics = ANTHROPIC_VERSION in request.headers
    return JSONResponse(anthropic_models.info(card) if is_anthropics else card)


def _with_headers(call: Call, request: Request) -> Call:
    """Return the call with its caller and the values of its headers."""
    return replace(
        call.with_caller(caller_of(request)),
        headers=_for_features(request),
        wants_receipts=request.headers.get(RECEIPT, "0") not in ("0", ""),
    )


def _for_features(request: Request) -> dict[str, str]:
    """Return the headers that features read, decoded as UTF-8."""
    given = {name: request.headers[name] for name in HEADERS if name in request.headers}
    return {name: as_utf8(value) for name, value in given.items()}


async def _score(request: Request, entry: Entry) -> Response:
    """Return the response to a scoring request."""
    models: Models = request.app.state.models
    scoring, raw, name = await request.app.state.bodies.read(parse_scoring, request)
    request.state.model = model = await models.find(name, caller_of(request))
    call, id_ = await model.requests.scoring(scoring, raw), request_id(request)
    response = await answer(call, request, entry, id_=id_)
    if response.status_code != 200:
        return response
    response.body = encode(await scores(scoring, members(bytes(response.body)), id_=id_))
    response.headers["content-length"] = str(len(response.body))
    return response


async def answer(
    call: Call,
    request: Request,
    entry: Entry,
    *,
    id_: str,
    is_first: bool = True,
    signs: SignsOfLife | None = None,
    generate: Generating | None = None,
) -> Response:
    """Return the response to one call.

    Args:
        entry: the request's entry in the accounting (features/gate.py).
        id_: the request's id.
        is_first: whether it is the first call of its body. Later calls have no wait limit.
        signs: sends signs of life to the client of a stream; None: none are sent.
        generate: generates the response; None: see RequestHandler.answer.
    """
    models: Models = request.app.state.models
    call = _with_headers(call, request)
    names = left_out(call)
    if signs is not None:
        signs.begin(call, header_of(names))
    request.state.model = model = await models.find(call.model, call.caller)
    variant = model.variant(call.model, call.caller.tenant) or ""
    call = model.with_data(replace(call, variant=variant), request.state.kept)
    side = model.extending.get(call.path)
    if side and (answered := await side.answer(call, request)):
        if isinstance(answered, Response):
            say_left_out(answered, names)
            return answered
        call = answered
    max_wait_s = model.settings.max_wait_s
    urgency = urgency_of(request.headers, call.body, call.caller, max_wait_s=max_wait_s)
    context = RequestContext(
        request_id=id_,
        choices=call.n,
        namespace=call.cache_salt,
        entry=entry,
        variant=variant,
        urgency=urgency if is_first else urgency.without_limit(),
        hints=hints_of(request.headers, call, model.promises),
    )
    response = await model.requests.answer(call, context, generate)
    say_left_out(response, names)
    is_complete = response.status_code == 200 and not isinstance(response, StreamingResponse)
    report_format = request.headers.get(FORMAT_HEADER)
    if is_complete and call.path in REPORTING and report_format:
        response.headers.update(report_headers(report_format, model.status.load()))
    return response
