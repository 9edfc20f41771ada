"""A client of an attached server whose replies a test writes."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, cast

from kvroute.replica.attached_engine.server_client import OpenReply, Reply, ServerClient


class Asked(NamedTuple):
    """A request."""

    path: str
    body: bytes
    headers: Mapping[str, str]


class Stream(NamedTuple):
    """A reply that is received in parts."""

    status: int
    content_type: str
    parts: Callable[[], AsyncIterator[bytes]]


class ScriptedClient(ServerClient):
    """Has no connections: a function replies, or raises ServerLostError."""

    def __init__(self, url: str, respond: Callable[[Asked], Reply | Stream]) -> None:
        super().__init__(url)
        self._respond = respond

    async def _ask(self, method: str, path: str, **options: Any) -> Reply:
        reply = self._respond(Asked(path, options.get("data", b""), options.get("headers", {})))
        assert isinstance(reply, Reply), f"{method} {path} has a stream as its reply"
        return reply

    @asynccontextmanager
    async def open(
        self, path: str, body: bytes | AsyncIterator[bytes], headers: Mapping[str, str]
    ) -> AsyncIterator[OpenReply]:
        sent = body if isinstance(body, bytes) else b"".join([part async for part in body])
        reply = self._respond(Asked(path, sent, headers))
        assert isinstance(reply, Stream), f"{path} has a stream as its reply"
        yield cast(OpenReply, reply)
