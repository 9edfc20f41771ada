"""A request gets past a closed gate only with a caller whom the gate knows."""

from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from kvroute.features.gate import ANYONE, Caller
from kvroute.router.middleware import caller_check
from kvroute.router.middleware.caller_check import CallerCheck, caller_of, client_for, gate_of
from kvroute.settings.help import SettingsError
from kvroute.settings.router import RouterSettings
from tests.support.gates import ClosedGate

A = Caller("a")


async def application(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse(caller_of(Request(scope)).tenant)(scope, receive, send)


async def answer(caller: Caller | None, path: str, key: str = "") -> tuple[int, str]:
    guarded = CallerCheck(application, gate=ClosedGate(A), refused=lambda error: None)
    async with client_for(guarded, caller) as client:
        found = await client.get(path, headers={"x-api-key": key})
    return found.status_code, found.text if found.status_code == 200 else ""


async def test_a_closed_gate_lets_in_whom_it_knows() -> None:
    assert await answer(None, "/v1/models", key="a") == (200, "a")
    assert await answer(None, "/v1/models", key="b") == (401, "")
    assert await answer(None, "/health") == (200, "")


async def test_a_router_s_own_request_has_the_tenant_for_whom_it_is_sent() -> None:
    assert await answer(Caller("b"), "/v1/models", key="a") == (200, "b")


async def test_a_router_s_own_request_without_a_tenant_is_refused() -> None:
    """Such as one for a batch whose tenant has no key any more."""
    assert await answer(None, "/v1/models") == (401, "")


def test_anyone_has_no_tenant_and_no_limits() -> None:
    assert (ANYONE.tenant, ANYONE.limits) == ("", {})
    assert ANYONE.salted("s") == "s"
    assert ANYONE.may_use("any adapter")


def test_a_router_without_the_feature_that_checks_keys_does_not_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(caller_check, "FEATURES", ())
    closed = {"api_keys": tmp_path / "keys.json"}
    with pytest.raises(SettingsError, match="no feature that checks API keys"):
        gate_of(RouterSettings(served_model_name="m", redis_url="", **closed))
    assert gate_of(RouterSettings(served_model_name="m", redis_url="")).is_open
