"""Limits the number of requests that a router handles at the same time."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.router.api.errors import ApiError, response
from kvroute.router.api.fair_lock import FairLock

# With more open requests than this, other tasks get more time between the starts of two requests.
CROWD = 64


class Admission:
    """ASGI middleware that rejects POST requests above the limit with 429.

    A request counts until the last byte of its response. GET requests are not limited, so that
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
        self._lock = FairLock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._open >= self._limit:
            await self._refusal(scope["path"])(scope, receive, send)
            return
        self._open += 1
        try:
            await self._lock.wait(is_crowd=self._open > CROWD)
            await self._app(scope, receive, send)
        finally:
            self._open -= 1

    def _refusal(self, path: str) -> Response:
        error = ApiError(
            429,
            f"this router handles {self._open} requests, which is its limit; try again, or raise "
            "--max-requests",
            code="overloaded",
        )
        self._refused(error)
        return response(error, path=path)
