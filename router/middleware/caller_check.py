"""Asks the gate for the caller of each request, before the body is read, and whether it may begin.

Without a feature that closes the gate, all requests are those of the caller ANYONE.
"""

import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any

import httpx
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.features import FEATURES, PATHS
from kvroute.features.gate import (
    ANYONE,
    OPEN,
    ROLES,
    UNCOUNTED,
    UNGUARDED,
    Caller,
    Entry,
    Gate,
    Role,
)
from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    STATELESS_ROUTES,
)
from kvroute.router.api.errors import FINAL, ApiError, path_of, response
from kvroute.router.api.scoring import SCORING
from kvroute.settings.help import SettingsError
from kvroute.settings.router import RouterSettings

# Key in the ASGI scope of requests that this process sends to itself: their caller.
INTERNAL_CALLER = "kvroute.caller"

AT_OPEN_GATE = nullcontext(UNCOUNTED)
NOT_COMPUTED = (429, 503)  # statuses of requests for which nothing was computed
# Everybody may use these.
EVERYBODY = ("/health", "/ping", "/docs", "/openapi.json", *PATHS.everybody)
ANY = ("/v1/models", "/version")  # any role
USE = (  # the role use
    *(CHAT_COMPLETIONS, COMPLETIONS, RESPONSES, MESSAGES, SCORING, *STATELESS_ROUTES),
    "/v1/route",
    *PATHS.use,
)
OBSERVE = ("/v1/cluster", "/v1/metrics/targets", "/metrics", *PATHS.observe)  # the role observe
NO_TIMEOUT = httpx.Timeout(None)  # an answer may take any time


def gate_of(settings: RouterSettings) -> Gate:
    """Return the gate that a feature closes, or else an open one. This waits for the disk.

    Raises:
        SettingsError: --api-keys is set, and no feature closes the gate.
    """
    gates = (feature.gate(settings) for feature in FEATURES)
    gate = next((gate for gate in gates if gate is not None), OPEN)
    if gate.is_open and settings.api_keys is not None:
        raise SettingsError(UNGUARDED)
    return gate


class CallerCheck:
    """ASGI middleware that rejects requests whose caller the gate does not let in.

    Args:
        refused: called with each error.
    """

    def __init__(self, app: ASGIApp, *, gate: Gate, refused: Callable[[ApiError], None]) -> None:
        self._app = app
        self._gate = gate
        self._refused = refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                scope.setdefault("state", {})["caller"] = await self._caller(scope)
            except ApiError as error:
                self._refused(error)
                await response(error, path=path_of(scope))(scope, receive, send)
                return
        await self._app(scope, receive, send)

    async def _caller(self, scope: Scope) -> Caller:
        """Return the caller of a request, which for some routes is anyone."""
        if caller := scope.get(INTERNAL_CALLER):  # only this process itself can set it
            assert isinstance(caller, Caller)
            return caller
        path = scope["path"].removeprefix(scope.get("root_path", ""))
        roles = roles_for(scope["method"], path)
        return await self._gate.caller(scope, roles) if roles else ANYONE


def caller_of(request: Request) -> Caller:
    """Return the caller of a request."""
    caller: Caller = getattr(request.state, "caller", ANYONE)
    return caller


def at_gate(request: Request) -> AbstractContextManager[Entry]:
    """Return a context that lasts until the request has ended.

    If the request was rejected, what it was charged is refunded. If its client has disconnected,
    the charge stays, since a replica may have computed the tokens. The context raises ApiError if
    the request may not begin now.
    """
    gate: Gate = request.app.state.gate
    return AT_OPEN_GATE if gate.is_open else _at_gate(gate, request)


@contextmanager
def _at_gate(gate: Gate, request: Request) -> Iterator[Entry]:
    with counting_refusals(request):
        entry = gate.enter(caller_of(request), time.monotonic())
    try:
        yield entry
    except ApiError as error:
        if error.status in NOT_COMPUTED and error.code not in FINAL:
            entry.refund(time.monotonic())
        raise
    finally:
        entry.leave()


@contextmanager
def counting_refusals(request: Request) -> Iterator[None]:
    """Count an error that is raised in the block as a rejected request.

    An error that is raised before the request's model is known counts for the first model.
    """
    try:
        yield
    except Exception as error:
        getattr(request.state, "model", request.app.state.models.first).telemetry.refused(error)
        raise


@lru_cache(maxsize=1024)
def roles_for(method: str, path: str) -> Sequence[Role]:
    """Return the roles that may use a route: a caller needs one of them. Empty: everybody may.

    A route that is in none of the lists above or of PATHS needs the role manage.
    """
    if path == "/" or _is_in(path, EVERYBODY):
        return ()
    if _is_in(path, ANY):
        return ROLES
    if _is_in(path, PATHS.manage):
        return ("manage",)
    if _is_in(path, OBSERVE) or (method in ("GET", "HEAD") and _is_in(path, PATHS.read)):
        return ("observe",)
    return ("use",) if _is_in(path, USE) else ("manage",)


def _is_in(path: str, routes: Iterable[str]) -> bool:
    return any(path == route or path.startswith(f"{route}/") for route in routes)


def client_for(application: ASGIApp, caller: Caller | None) -> httpx.AsyncClient:
    """Return a client whose requests count as the caller's.

    Args:
        application: the router's HTTP application.
        caller: the sender of the requests; None: unknown, so that a closed gate refuses them.
    """

    async def as_caller(scope: Scope, receive: Receive, send: Send) -> None:
        mutable: MutableMapping[str, Any] = scope
        mutable[INTERNAL_CALLER] = caller
        await application(scope, receive, send)

    transport = httpx.ASGITransport(as_caller, raise_app_exceptions=False)
    return httpx.AsyncClient(
        transport=transport, base_url="http://localhost", timeout=NO_TIMEOUT, trust_env=False
    )
