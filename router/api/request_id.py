"""One id for a request, from its header to the engine: the client's `x-request-id`, or a new one.

Ray Serve takes the header as it comes or makes an id, returns it with every answer, and has it in
the log lines of every process that works on the request. Here is what Serve does not do: an id
that would not do in a log is replaced before Serve sees it.
"""

import re
import secrets
import uuid

from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

HEADER = "x-request-id"
GOOD = re.compile(rb"[!-~]{1,128}")  # printable ASCII without spaces


class GoodIds:
    """Takes the header away unless it is there once and good. It stands in front of Serve, which
    would answer 500 to one that is not UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope["headers"] = _good(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """What Serve puts in front of itself: RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this."""
    return [Middleware(GoodIds)]


def request_id(request: Request) -> str:
    return request.headers.get(HEADER) or uuid.uuid4().hex


def dispatch_id(request_id: str) -> str:
    """For one prompt of the request. Clients may use an id twice, engines and routers may not."""
    return f"{request_id}-{secrets.token_hex(4)}"


def _good(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    ids = [value for name, value in headers if name == HEADER.encode()]
    if len(ids) == 1 and GOOD.fullmatch(ids[0]):
        return headers
    return [each for each in headers if each[0] != HEADER.encode()]
