"""Looks at the path and the method of each request before a key is asked for.

So a client with a wrong path reads that, and not that it needs a stronger key. Pages of other sites
are refused before, and those of an allowed origin can read these errors, too (origins.py).
"""

from collections.abc import Sequence
from functools import lru_cache

from starlette.requests import Request
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvroute.router.api.errors import ApiError, response
from kvroute.router.middleware.missing_routes import MISSING

PATHS = 1024  # number of paths of which the methods are remembered


class _HeadSentError(Exception):
    """The head of a response was sent, and the rest is not needed."""


class KnownRoutes:
    """ASGI middleware that answers requests which no route takes.

    A slash at the end of a path is ignored, and HEAD is answered as GET without its body.

    Args:
        routes: all routes of the application.
    """

    def __init__(self, app: ASGIApp, *, routes: Sequence[BaseRoute]) -> None:
        self._app = app
        self._routes = routes
        self._methods = lru_cache(maxsize=PATHS)(self._methods_of)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] == "OPTIONS":
            await self._app(scope, receive, send)
            return
        method, path = scope["method"], scope["path"]
        if path.endswith("/") and (methods := self._methods(path.rstrip("/"))):
            path = path.rstrip("/")
            scope = {**scope, "path": path, "raw_path": path.encode()}
        else:
            methods = self._methods(path)
        if method in methods:
            await self._app(scope, receive, send)
        elif method == "HEAD" and "GET" in methods:
            await self._head({**scope, "method": "GET"}, receive, send)
        else:
            error = refusal(method, Request(scope).url.path, methods)
            await response(error, path=path)(scope, receive, send)

    async def _head(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def head_only(message: Message) -> None:
            if message["type"] == "http.response.start":
                await send(message)
                return
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            if message.get("more_body"):
                raise _HeadSentError

        try:
            await self._app(scope, receive, head_only)
        except _HeadSentError:
            return

    def _methods_of(self, path: str) -> frozenset[str]:
        """Return the methods of all routes with this path."""
        scope = {"type": "http", "method": "GET", "path": path, "headers": []}
        return frozenset(
            method
            for route in self._routes
            if route.matches(scope)[0] != Match.NONE
            for method in getattr(route, "methods", None) or ()
        )


def refusal(method: str, path: str, methods: frozenset[str]) -> ApiError:
    """Return the error for a path that has no route with this method.

    Args:
        methods: the methods that the path has.
    """
    where = "GET /docs lists the routes."
    if methods:
        allowed = ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))
        problem = f"{path[:200]} has no method {method}; use {allowed}"
        return ApiError(405, f"{problem}. {where}", headers={"Allow": allowed})
    problem = f"there is no route {path[:200]}"
    if path in MISSING:
        problem = f"kvroute does not have vLLM's route {path}: {MISSING[path]}"
    return ApiError(404, f"{problem}. {where}")
