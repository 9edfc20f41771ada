"""Removes the headers with which clients could control Ray Serve.

With these headers, any client could set a time limit for its request, keep a request running after
disconnecting, and choose replicas. Serve also answers with 500 to values that are not UTF-8.
"""

from collections.abc import Iterable
from typing import Final

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.router.middleware.old_clients import WholeAnswers
from kvroute.router.middleware.request_id import ValidIds

Header = tuple[bytes, bytes]

OBEYED: Final = frozenset(  # Serve accepts hyphens and underscores; these names have hyphens
    {
        b"x-request-timeout-seconds",  # ends the request after this time, also a running stream
        b"x-request-disconnect-disabled",  # keeps the request running when its client disconnects
        b"serve-multiplexed-model-id",  # chooses a router by the model that it has loaded
    }
)
OF_SERVES_OWN_ROUTER: Final = b"x-serve-router-"  # start of all header names of Serve's own router


class WithoutServeHeaders:
    """ASGI middleware that removes OBEYED headers, and converts all other values to UTF-8."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["headers"] = _harmless(scope["headers"])
        await self._app(scope, receive, send)


def middlewares() -> list[Middleware]:
    """Return the middlewares that Serve's HTTP proxy runs before its own code.

    RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH names this function.
    """
    return [Middleware(WholeAnswers), Middleware(ValidIds), Middleware(WithoutServeHeaders)]


def _harmless(headers: Iterable[Header]) -> list[Header]:
    return [(name, _utf8(value)) for name, value in headers if not _is_obeyed(name)]


def _is_obeyed(name: bytes) -> bool:
    name = name.lower().replace(b"_", b"-")
    return name in OBEYED or name.startswith(OF_SERVES_OWN_ROUTER)


def _utf8(value: bytes) -> bytes:
    """Return the value in UTF-8; a value that is not UTF-8 is taken for Latin-1."""
    if value.isascii():
        return value
    try:
        value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1").encode()
    return value
