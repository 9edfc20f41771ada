"""Sends responses with a length to HTTP/1.0 clients, which cannot read chunked responses."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


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
