"""A router takes so many requests at a time; more are refused at once, and told to come again."""

from collections.abc import Callable

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.router.api.errors import ApiError, response
from kvroute.router.api.turns import Turns

CROWD = 64  # requests that are open


class Admission:
    """Counts POST requests from their head to the last byte of their response. GET requests always
    pass: whoever asks for a router's health is answered under any load. Requests that come together
    begin one by one, so nobody else waits for all of them.

    refused: called with each refusal.
    """

    def __init__(self, app: ASGIApp, *, limit: int, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._limit = limit
        self._refused = refused
        self._open = 0  # requests
        self._turns = Turns()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        if self._open >= self._limit:
            await self._refusal(scope["path"])(scope, receive, send)
            return
        self._open += 1
        try:
            await self._turns.next(is_crowd=self._open > CROWD)
            await self._app(scope, receive, send)
        finally:
            self._open -= 1

    def _refusal(self, path: str) -> Response:
        error = ApiError(
            429,
            f"{self._open} requests are under way in this router, the most that it takes; try "
            "again, or raise KVROUTE_MAX_REQUESTS",
            type="rate_limit_error",
            code="overloaded",
        )
        self._refused(error)
        return response(error, path=path)
