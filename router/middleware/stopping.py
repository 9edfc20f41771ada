"""Graceful shutdown of a router: it rejects new requests, and lets running answers finish."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.router.api.errors import EVENTS, ApiError, event, path_of, response

# For new requests.
REFUSED = ApiError(503, "the server is stopping; send the request again", code="stopping")
CUT = ApiError(  # for running answers that are ended
    503,
    "the server stopped before the answer was complete; send the request again",
    code="stopping",
)


class RunningAnswers:
    """The POST requests that a router is answering."""

    def __init__(self) -> None:
        self.is_stopping = False  # true once new requests are refused
        self.count = 0  # number of running answers
        self._limits = set[asyncio.Timeout]()  # a timeout for each running answer; `end` sets it

    def stop(self) -> int:
        """Reject new requests from now on, and return how many answers are still running."""
        self.is_stopping = True
        return self.count

    def end(self) -> None:
        """End all running answers with an error."""
        now_s = asyncio.get_running_loop().time()
        while self._limits:
            self._limits.pop().reschedule(now_s)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Timeout]:
        """Count an answer as running during the block. `end` raises TimeoutError in the block."""
        self.count += 1
        try:
            async with asyncio.timeout(None) as limit:
                self._limits.add(limit)
                try:
                    yield limit
                finally:
                    self._limits.discard(limit)
        finally:
            self.count -= 1


class LastAnswers:
    """ASGI middleware that rejects requests and ends answers when the router stops.

    Args:
        app: the application behind the middleware.
        answers: the running answers.
        refused: called with each error.
    """

    def __init__(
        self, app: ASGIApp, *, answers: RunningAnswers, refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._answers = answers
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._answers.is_stopping:
            self._refused(REFUSED)
            await response(REFUSED, path=path_of(scope))(scope, receive, send)
            return
        sent = _SentParts(send)
        try:
            async with self._answers.running() as limit:
                await self._app(scope, receive, sent)
        except TimeoutError:
            if not limit.expired():
                raise
            await _end(sent, scope, receive)


class _SentParts:
    """Forwards a response, and records its start, its last part, and whether it is complete."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.start: Message | None = None
        self.last = b""  # the last part of the body
        self.is_complete = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
        elif message["type"] == "http.response.body":
            self.last = message.get("body", b"")
            self.is_complete = not message.get("more_body", False)
        await self.send(message)

    @property
    def is_stream(self) -> bool:
        headers = Headers(raw=self.start["headers"]) if self.start else {}
        return headers.get("content-type", "").startswith(EVENTS)


async def _end(sent: _SentParts, scope: Scope, receive: Receive) -> None:
    """Send the error CUT instead of the rest of the answer.

    If the response has started and is not a stream, no error can be sent. The server closes the
    connection. The client notices this, since it has fewer bytes than the response's length.
    """
    path = scope["path"]
    if sent.start is None:
        await response(CUT, path=path)(scope, receive, sent.send)
    elif sent.is_stream and not sent.is_complete:
        data = event(CUT, sent.last, path=path)
        await sent.send({"type": "http.response.body", "body": data, "more_body": False})
