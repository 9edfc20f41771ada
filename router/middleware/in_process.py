"""Sends requests to this process's own HTTP application, without a connection."""

from collections.abc import MutableMapping
from typing import Any

import httpx
from starlette.types import ASGIApp, Receive, Scope, Send

from kvroute.features.gate import Caller
from kvroute.router.middleware.entrance import INTERNAL_CALLER

NO_TIMEOUT = httpx.Timeout(None)  # an answer may take any time


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
