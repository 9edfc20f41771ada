"""An HTTP/1.0 client gets a whole response instead of chunks."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from kvroute.router.middleware.serve_headers import BufferedResponses


async def pieces() -> AsyncIterator[bytes]:
    for piece in (b"one", b"two", b"three"):
        yield piece


async def answer(request: Request) -> StreamingResponse:
    return StreamingResponse(pieces())


async def sent_to(version: str) -> list[Any]:
    """Return the messages that a client with this version of HTTP gets."""
    sent = list[Any]()
    app = BufferedResponses(Starlette(routes=[Route("/", answer, methods=["POST"])]))

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": version, "method": "POST", "path": "/", "headers": []}
    await app(scope | {"query_string": b"", "asgi": {"spec_version": "2.4"}}, receive, send)
    return sent


async def test_a_stream_becomes_one_response_with_its_length() -> None:
    start, body = await sent_to("1.0")
    assert (b"content-length", b"11") in start["headers"]
    assert body == {"type": "http.response.body", "body": b"onetwothree"}


@pytest.mark.parametrize("version", ["1.1", "2"])
async def test_other_clients_get_each_piece_at_once(version: str) -> None:
    start, *parts = await sent_to(version)
    assert b"content-length" not in dict(start["headers"])
    assert [part["body"] for part in parts] == [b"one", b"two", b"three", b""]
