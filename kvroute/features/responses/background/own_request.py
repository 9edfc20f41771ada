"""Sends a request to this process's own HTTP application, and hands on what it answers."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope

from kvroute.features.gate import Caller
from kvroute.process.asgi import post_scope
from kvroute.router.api.calls import RESPONSES
from kvroute.router.middleware.caller_check import INTERNAL_CALLER

# Key in the ASGI scope of requests whose answer is kept as that of a background response.
IS_BACKGROUND = "kvroute.background"


async def ask(
    application: ASGIApp,
    body: bytes,
    *,
    headers: Mapping[str, str],
    caller: Caller | None,
    started: Callable[[int, Mapping[str, str]], None],
    received: Callable[[bytes], Awaitable[None]],
) -> None:
    """Send a request to /v1/responses, and return when its answer has ended.

    A cancelled call ends the request, as if its client had disconnected.

    Args:
        body: a JSON object.
        headers: more headers of the request.
        caller: the sender of the request; None: unknown, so that a closed gate refuses it.
        started: called with the status and the headers of the response.
        received: called with each part of the response's body.
    """
    own = {
        "host": "localhost",
        "content-type": "application/json",
        "content-length": f"{len(body)}",
    }
    encoded = [_encoded(name, value) for name, value in {**headers, **own}.items()]
    scope: Scope = {
        **post_scope(RESPONSES, encoded),
        "client": ("127.0.0.1", 0),
        "server": ("localhost", 80),
        INTERNAL_CALLER: caller,
        IS_BACKGROUND: True,
    }
    parts = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for part in parts:
            return part
        return await asyncio.Future()  # the client never disconnects

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            started(message["status"], dict(Headers(raw=message["headers"])))
        elif message["type"] == "http.response.body" and message.get("body"):
            await received(message["body"])

    await application(scope, receive, send)


def _encoded(name: str, value: str) -> tuple[bytes, bytes]:
    return name.encode("latin-1"), value.encode("latin-1", errors="replace")
