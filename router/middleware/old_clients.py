"""Clients of HTTP/1.0 get answers as a whole: they cannot read chunks."""

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class WholeAnswers:
    """Collects what a POST request of HTTP/1.0 gets, and sends it with its length.

    The server would send it in chunks, which only HTTP/1.1 has, to whomever.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope.get("http_version") == "1.0" and scope.get("method") == "POST":
            send = _Collected(send)
        await self._app(scope, receive, send)


class _Collected:
    """Sends a response when it is complete."""

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
