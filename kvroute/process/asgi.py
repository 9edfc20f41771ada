"""Requests to an HTTP application of the same process, over ASGI."""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from kvroute.contract.http_call import PART_BYTES


def post_scope(path: str, headers: Iterable[tuple[bytes, bytes]]) -> dict[str, Any]:
    """Return the ASGI scope of a POST request, without addresses.

    Args:
        path: the route.
        headers: names in lower case, and values.
    """
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [*headers],
        "client": None,
        "server": None,
        "state": {},
    }


async def body_messages(body: bytes, path: str = "") -> AsyncGenerator[dict[str, Any], None]:
    """Yield the ASGI messages with a request's body.

    Args:
        body: the end of the body.
        path: a file with the beginning of the body; empty: `body` is all of it.
    """
    if path:
        async with aclosing(pieces(path)) as parts:
            async for part in parts:
                yield {"type": "http.request", "body": part, "more_body": True}
    yield {"type": "http.request", "body": body, "more_body": False}


async def pieces(path: str) -> AsyncGenerator[bytes, None]:
    """Yield the content of a file in parts of at most PART_BYTES. Raises OSError."""
    file = await asyncio.to_thread(open, path, "rb", buffering=0)
    try:
        while piece := await asyncio.to_thread(file.read, PART_BYTES):
            yield piece
    finally:
        file.close()


def content_type(message: Mapping[str, Any]) -> str:
    """Return the content type in an ASGI message http.response.start."""
    for name, value in message["headers"]:
        if name.lower() == b"content-type":
            return str(value, "latin-1")
    return ""
