"""Limits the number of requests that a router handles at the same time."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.router.api.errors import ApiError, response
from kvroute.router.api.fair_lock import FairLock

# With more open requests than this, other tasks get more time between the starts of two requests.
CROWD = 64
# Maximum number of forms whose bodies still arrive, as a share of the limit of open requests. A
# slow client can hold such a request for a long time, while the router has nothing to do for it.
ARRIVING_SHARE = 0.25


class OpenLimit:
    """ASGI middleware that rejects POST requests above the limit with 429.

    Forms have a smaller limit while their bodies arrive, so that uploads do not take all places. A
    request counts until the last byte of its response. GET requests are not limited, so that
    health checks are answered under any load. POST requests that arrive together start one by one,
    so that other requests do not wait for all of them.

    Args:
        app: the application behind the middleware.
        limit: the most POST requests at the same time.
        refused: called with each error.
    """

    def __init__(self, app: ASGIApp, *, limit: int, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._limit = limit
        self._refused = refused
        self._open = 0  # number of open POST requests
        self._arriving = 0  # number of these that are forms whose bodies still arrive
        self._lock = FairLock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._open >= self._limit:
            await self._refusal(scope["path"], self._open, "requests")(scope, receive, send)
            return
        app = self._upload if _is_form(scope) else self._start
        if app == self._upload and self._arriving >= max(1, ARRIVING_SHARE * self._limit):
            await self._refusal(scope["path"], self._arriving, "uploads")(scope, receive, send)
            return
        self._open += 1
        try:
            await app(scope, receive, send)
        finally:
            self._open -= 1

    async def _start(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, after other tasks have run."""
        await self._lock.wait(is_crowd=self._open > CROWD)
        await self._app(scope, receive, send)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a form, and count it as arriving until its body is complete."""
        is_arriving = True

        def arrived() -> None:
            nonlocal is_arriving
            self._arriving -= is_arriving
            is_arriving = False

        async def counted() -> Message:
            message = await receive()
            if not message.get("more_body"):
                arrived()
            return message

        self._arriving += 1
        try:
            await self._start(scope, counted, send)
        finally:
            arrived()

    def _refusal(self, path: str, count: int, kind: str) -> Response:
        error = ApiError(
            429,
            f"this router handles {count} {kind}, which is its limit; try again, or raise "
            "--max-requests",
            code="overloaded",
        )
        self._refused(error)
        return response(error, path=path)


def _is_form(scope: Scope) -> bool:
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    return bool(kind.lower().startswith(b"multipart/form-data"))
