"""Requests lose the headers that Ray Serve obeys before Serve sees them.

Serve lets any client limit the time of its request, keep a request alive that nobody reads, and
choose replicas. It answers with a 500 to header values that are not UTF-8.
"""

from collections.abc import Iterable
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.router.middleware.old_clients import WholeAnswers
from kvroute.router.middleware.request_id import ValidIds

Header = tuple[bytes, bytes]

OBEYED: Final = frozenset(  # with hyphens for underscores: Serve takes both
    {
        b"x-request-timeout-seconds",  # ends the request, a running stream too
        b"x-request-disconnect-disabled",  # the request runs on when its client has left
        b"serve-multiplexed-model-id",  # chooses a router by what it has loaded
    }
)
OF_SERVES_OWN_ROUTER: Final = b"x-serve-router-"  # begins all names that Serve's router may set


class WithoutServeHeaders:
    """Removes what Serve obeys, and makes all other values UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = _harmless(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return what Serve runs before itself.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function.
    """
    return [Middleware(WholeAnswers), Middleware(ValidIds), Middleware(WithoutServeHeaders)]


def _harmless(headers: Iterable[Header]) -> list[Header]:
    return [(name, _utf8(value)) for name, value in headers if not _is_obeyed(name)]


def _is_obeyed(name: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name in OBEYED or name.startswith(OF_SERVES_OWN_ROUTER)


def _utf8(value: bytes) -> bytes:
    """Return the value, read as Latin-1 if it is not UTF-8."""
    if value.isascii():
        return value
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
