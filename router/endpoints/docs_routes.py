"""HTTP routes that list all routes: a page for people, and an OpenAPI document for tools.

The document has no schemas: the fields of requests are those of the installed vLLM.
"""

from collections.abc import Iterator
from html import escape

from fastapi import APIRouter, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.routing import BaseRoute, Route

from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    INPUT_TOKENS,
    INVOCATIONS,
    MESSAGES,
    RESPONSES,
)
from kvroute.router.api.chat_list import CHAT_BATCH
from kvroute.router.api.scoring import SCORING

SUMMARIES = {  # route whose endpoint has no docstring -> what it does
    CHAT_COMPLETIONS: "OpenAI's chat completions.",
    CHAT_BATCH: "Several chats in one request.",
    COMPLETIONS: "OpenAI's completions.",
    RESPONSES: "OpenAI's responses.",
    INPUT_TOKENS: "Count the tokens that a response would have as its input.",
    MESSAGES: "Anthropic's messages.",
    f"{MESSAGES}/count_tokens": "Count the tokens of Anthropic's messages.",
    SCORING: "How likely tokens are after a query and each of several items.",
    INVOCATIONS: "SageMaker's: a chat, a completion or a pooling model's body.",
    "/tokenize": "Return the tokens of a text or a chat.",
    "/detokenize": "Return the text of tokens.",
}
OTHERS = "For pooling models: embeddings, scores or classes."
INTRODUCTION = (
    "Fields, headers and receipts are in docs/api.md of kvroute's repository, errors in "
    "docs/errors.md. /openapi.json has this list for programs."
)
HEADERS = {  # of HTML pages
    # Nothing from clients may run as code or be sent to another server.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}

routes = APIRouter()


@routes.get("/docs")
async def docs(request: Request) -> Response:
    """Return this list of routes as a page."""
    rows = "".join(
        f"<tr><td>{method}<td><code>{escape(path)}</code><td>{escape(summary, quote=False)}"
        for method, path, summary in _described(request.app.routes)
    )
    page = (
        "<!doctype html><html lang=en><meta charset=utf-8><title>kvroute: routes</title>"
        f"<h1>Routes of kvroute</h1><p>{INTRODUCTION}"
        f"<table><tr><th>Method<th>Path<th>{rows}</table>"
    )
    return HTMLResponse(page, headers=HEADERS)


@routes.get("/openapi.json")
async def openapi(request: Request) -> Response:
    """Return this list of routes as an OpenAPI document."""
    paths: dict[str, dict[str, object]] = {}
    for method, path, summary in _described(request.app.routes):
        success = {"200": {"description": "Success"}}
        operation = {"summary": summary, "responses": success}
        paths.setdefault(path.replace(":path}", "}"), {})[method.lower()] = operation
    info = {"title": "kvroute", "version": "1", "description": INTRODUCTION}
    return JSONResponse({"openapi": "3.1.0", "info": info, "paths": paths})


def _described(all_routes: list[BaseRoute]) -> Iterator[tuple[str, str, str]]:
    """Yield method, path and summary of each route, in the order of the paths."""
    found = [route for route in all_routes if isinstance(route, Route)]
    for route in sorted(found, key=lambda route: route.path):
        for method in sorted((route.methods or set()) - {"HEAD"}):
            yield method, route.path, _summary(route)


def _summary(route: Route) -> str:
    if route.path in SUMMARIES:
        return SUMMARIES[route.path]
    has_own = hasattr(route.endpoint, "__name__")
    text = (route.endpoint.__doc__ or "") if has_own else ""
    return text.partition("\n")[0] or OTHERS
