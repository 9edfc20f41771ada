"""Checks that each request has an API key with the role that its route needs.

A request is rejected before its body is read. If an address sends wrong keys repeatedly, the
rejections are delayed. Requests with a valid key are never delayed.
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.features import PATHS
from kvroute.keys.key_file import ROLES, Role
from kvroute.keys.keyring import Caller, Keyring
from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STATELESS_ROUTES,
)
from kvroute.router.api.errors import ApiError, response
from kvroute.router.api.scoring import SCORING

# The routes that each role may use.
# No key is needed for these; the data that /ui shows needs one.
OPEN = ("/health", "/ping", "/ui", "/docs", "/openapi.json")
ANY = ("/v1/models", "/version")  # a key with any role is needed
USE = (  # the role use is needed
    *(CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES, SCORING, *STATELESS_ROUTES),
    *("/v1/route", *PATHS.use),
)
# The role observe is needed.
OBSERVE = ("/v1/cluster", "/v1/metrics/targets", "/metrics", *PATHS.observe)
# GET needs the role observe; other methods need the role manage.
READ = PATHS.read
MANAGE = (  # the role manage is needed
    *("/v1/cluster/audit", "/v1/cluster/canary"),
    *PATHS.manage,
)

# Key in the ASGI scope of requests that this process sends to itself: their caller.
INTERNAL_CALLER = "kvroute.caller"

FIRST_WAIT_S = 0.05  # delay of an address's first rejection; each further delay is twice as long
LONGEST_WAIT_S = 2.0  # the longest delay
FORGOTTEN_S = 60.0  # an address without a wrong key for this long starts again at the first delay
ADDRESSES = 4096  # the most addresses whose wrong keys are counted
WAITING = 256  # rejections that may be delayed at the same time; others are sent at once


class Access:
    """ASGI middleware that rejects requests without a suitable key.

    Args:
        app: the application behind the middleware.
        keys: returns the current keyring.
        refused: called with each error.
    """

    def __init__(
        self, app: ASGIApp, *, keys: Callable[[], Keyring], refused: Callable[[ApiError], None]
    ) -> None:
        self._app = app
        self._keys = keys
        self._refused = refused
        self._failures = Failures()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if INTERNAL_CALLER in scope:  # only this process itself can set it
            scope.setdefault("state", {})["caller"] = scope[INTERNAL_CALLER]
            await self._app(scope, receive, send)
            return
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        roles = roles_for(scope["method"], path)
        try:
            if roles:
                scope.setdefault("state", {})["caller"] = await self._caller(scope, roles)
        except ApiError as error:
            self._refused(error)
            refusal = response(error, path=scope["path"])
            if error.status == 401:
                refusal.headers["www-authenticate"] = "Bearer"
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope, roles: Sequence[Role]) -> Caller:
        """Return the owner of the request's key.

        Raises:
            ApiError: there is no valid key, or it has none of the roles.
        """
        key = _key_in(scope["headers"])
        caller = self._keys().caller(key) if key else None
        if caller is None:
            if key:
                await self._failures.slow_down(_address(scope))
            problem = "the API key is unknown or revoked" if key else "there is no API key"
            raise ApiError(
                401,
                f"{problem}; send one as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                code="invalid_api_key",
            )
        if caller.roles.isdisjoint(roles):
            raise ApiError(
                403,
                f"{scope['method']} {scope['path'][:80]} needs an API key with the role "
                f"{roles[0]}; this one has {' and '.join(sorted(caller.roles))}",
                code="insufficient_role",
            )
        return caller


class Failures:
    """Counts wrong keys by address, and delays their rejections."""

    def __init__(self) -> None:
        # For each address: the number of wrong keys, and the time of the last one.
        self._counts: OrderedDict[str, tuple[int, float]] = OrderedDict()
        self._waiting = 0  # rejections that are being delayed

    async def slow_down(self, address: str) -> None:
        """Count a wrong key of this address, and wait for the delay of its rejection."""
        wait_s = self._wait_s(address, time.monotonic())
        if self._waiting >= WAITING:
            return
        self._waiting += 1
        try:
            await asyncio.sleep(wait_s)
        finally:
            self._waiting -= 1

    def _wait_s(self, address: str, now_s: float) -> float:
        count, last_s = self._counts.pop(address, (0, now_s))
        count = 0 if now_s - last_s > FORGOTTEN_S else count
        self._counts[address] = count + 1, now_s
        if len(self._counts) > ADDRESSES:
            self._counts.popitem(last=False)
        return float(min(LONGEST_WAIT_S, FIRST_WAIT_S * 2 ** min(count, 16)))


@lru_cache(maxsize=1024)
def roles_for(method: str, path: str) -> Sequence[Role]:
    """Return the roles that may use a route: a key needs one of them. Empty: no key is needed.

    A route that is not in one of the lists above needs the role manage.
    """
    if path == "/" or _is_in(path, OPEN):  # "/" redirects to /ui
        return ()
    if _is_in(path, ANY):
        return ROLES
    if _is_in(path, MANAGE):
        return ("manage",)
    if _is_in(path, OBSERVE) or (method in ("GET", "HEAD") and _is_in(path, READ)):
        return ("observe",)
    return ("use",) if _is_in(path, USE) else ("manage",)


def caller_of(request: Request) -> Caller | None:
    """Return the owner of the request's key; None if the cluster has no keys."""
    caller: Caller | None = getattr(request.state, "caller", None)
    return caller


def _is_in(path: str, routes: Iterable[str]) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in routes)


def _key_in(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the API key in the headers; empty if there is none."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            value = value[7:]
        elif name != b"x-api-key":
            continue
        if key := value.strip():
            return key.decode("latin-1")
    return ""


def _address(scope: Scope) -> str:
    """Return the client's IP address; empty if it is unknown."""
    return str((scope.get("client") or ("",))[0])
