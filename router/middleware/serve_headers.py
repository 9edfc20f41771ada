"""Removes the headers with which clients could control Ray Serve.

With these headers, any client could set a time limit for its request, keep a request running after
disconnecting, and choose replicas. Serve also answers with 500 to values that are not UTF-8.
"""

from collections.abc import Iterable
from typing import Final

from starlette.datastructures import MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.router.middleware.request_id import ValidIds

Header = tuple[bytes, bytes]

# Headers that control Serve. It accepts them with hyphens and with underscores; these have hyphens.
CONTROL_HEADERS: Final = frozenset(
    {
        b"x-request-timeout-seconds",  # ends the request after this time, also a running stream
        b"x-request-disconnect-disabled",  # keeps the request running when its client disconnects
        b"serve-multiplexed-model-id",  # chooses a router by the model that it has loaded
    }
)
# The start of the names of further headers, which control Serve's own router.
CONTROL_PREFIX: Final = b"x-serve-router-"


class WithoutServeHeaders:
    """ASGI middleware that removes headers that control Serve, and converts others to UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = _cleaned(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares that Serve's HTTP proxy runs before its own code.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function.
    """
    return [Middleware(BufferedResponses), Middleware(ValidIds), Middleware(WithoutServeHeaders)]


def _cleaned(headers: Iterable[Header]) -> list[Header]:
    return [(name, _utf8(value)) for name, value in headers if not _controls_serve(name)]


def _controls_serve(name: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name in CONTROL_HEADERS or name.startswith(CONTROL_PREFIX)


def _utf8(value: bytes) -> bytes:
    """Return the value in UTF-8. A value that is not UTF-8 is converted from Latin-1."""
    if value.isascii():
        return value
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value


class BufferedResponses:
    """ASGI middleware that buffers the response to an HTTP/1.0 POST, and sends it with its length.

    Without it, the server would send a chunked response, which only HTTP/1.1 defines.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") == "1.0" and scope.get("method") == "POST":
            send = _Collected(send)
        await self._app(scope, receive, send)


class _Collected:
    """Collects a response, and sends it when it is complete."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message = {}
        self._parts: list[bytes] = []

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        self._parts.append(message.get("body", b""))
        if message.get("more_body", False):
            return
        body = b"".join(self._parts)
        MutableHeaders(scope=self._start)["content-length"] = str(len(body))
        await self._send(self._start)
        await self._send({"type": "http.response.body", "body": body})
