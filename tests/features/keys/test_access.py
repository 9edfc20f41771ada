"""Every route needs an API key with the route's role."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
from fastapi import FastAPI
from starlette.responses import JSONResponse

from kvroute.features.gate import Role
from kvroute.features.keys import key_gate
from kvroute.features.keys.key_file import new_file, new_key, write
from kvroute.features.keys.key_gate import Failures, KeyGate
from kvroute.router.middleware.caller_check import CallerCheck, roles_for
from tests.support.routes import routes


class Guarded:
    """An application that returns the request's caller, behind keys for each role."""

    def __init__(self, path: Path) -> None:
        self.refused: list[int] = []
        self.keys: dict[str, str] = {}
        entries = []
        for role in ("use", "observe", "manage"):
            key, entry = new_key(f"t-{role}", [role], "")
            self.keys[role] = key
            entries.append(entry)
        write(path, msgspec.structs.replace(new_file(), keys=tuple(entries)))
        http = FastAPI()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            caller = scope.get("state", {}).get("caller")
            await JSONResponse(caller and caller.tenant)(scope, receive, send)

        http.mount("/", app)
        guarded: Any = CallerCheck(
            http, gate=KeyGate(path), refused=lambda error: self.refused.append(error.status)
        )
        transport = httpx.ASGITransport(guarded)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://router")


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Guarded:
    monkeypatch.setattr(key_gate, "FIRST_WAIT_S", 0.0)
    return Guarded(tmp_path / "keys.json")


@pytest.mark.parametrize("role", ["use", "observe", "manage"])
async def test_a_key_gives_access_to_the_routes_of_its_role_only(
    guarded: Guarded, role: Role
) -> None:
    headers = {"authorization": f"Bearer {guarded.keys[role]}"}
    for method, path in routes():
        needed = roles_for(method, path)
        answer = await guarded.client.request(method, path, headers=headers)
        expected = 200 if not needed or role in needed else 403
        assert answer.status_code == expected, (method, path)
        if role in needed:
            assert answer.json() == f"t-{role}"
        elif needed:
            assert f"role {needed[0]}; the one in authorization has {role}" in answer.text


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"authorization": "Bearer kvr-000000000000-x"},
        {"authorization": "Bearer "},
        {"authorization": "Basic a3Zy"},
        {"x-api-key": ""},
        {"x-api-key": "sk-1"},
        {"cookie": "authorization=x"},
    ],
)
async def test_without_a_valid_key_no_route_is_reached(
    guarded: Guarded, headers: dict[str, str]
) -> None:
    asked = 0
    for method, path in routes():
        if not roles_for(method, path):
            continue
        asked += 1
        answer = await guarded.client.request(method, path, headers=headers)
        assert answer.status_code == 401, (method, path)
        assert answer.headers["www-authenticate"] == "Bearer"
        error = answer.json()["error"]
        if path.startswith("/v1/messages"):
            assert (answer.json()["type"], error["type"]) == ("error", "authentication_error")
        else:
            assert error["code"] == "invalid_api_key"
    assert guarded.refused == [401] * asked


@pytest.mark.parametrize("name", ["x-api-key", "api-key"])
@pytest.mark.parametrize(
    "other", ["Bearer ", "Bearer sk-of-a-proxy", "Basic a3Zy", "Bearer observe"]
)
async def test_the_key_can_be_in_anthropics_or_azures_header_beside_another_credential(
    guarded: Guarded, name: str, other: str
) -> None:
    own = {name: guarded.keys["use"]}
    given = {"authorization": other.replace("observe", guarded.keys["observe"])}
    for headers in (own, own | given, given | own):
        answer = await guarded.client.post("/v1/messages", headers=headers)
        assert answer.json() == "t-use"


async def test_of_two_valid_keys_the_order_of_names_decides(guarded: Guarded) -> None:
    first = {"authorization": f"Bearer {guarded.keys['observe']}"}
    second = {"x-api-key": guarded.keys["manage"]}
    for headers in (first | second, second | first):
        answer = await guarded.client.get("/v1/cluster", headers=headers)
        assert answer.json() == "t-observe"


async def test_an_error_names_the_headers_whose_keys_were_read(guarded: Guarded) -> None:
    headers = {"api-key": "wrong", "authorization": "Bearer wrong"}
    answer = await guarded.client.get("/v1/models", headers=headers)
    assert "the API key in authorization and in api-key is unknown" in answer.text


async def test_a_key_in_the_query_is_ignored(guarded: Guarded) -> None:
    """A key in the query would be written to logs."""
    answer = await guarded.client.get("/v1/models", params={"api_key": guarded.keys["use"]})
    assert answer.status_code == 401


def test_rejections_of_an_address_take_longer_each_time_and_others_do_not() -> None:
    failures = Failures()
    waits = [failures._wait_s("a", 0.0) for _ in range(20)]
    assert waits == sorted(waits)
    assert (waits[0], waits[-1]) == (key_gate.FIRST_WAIT_S, key_gate.LONGEST_WAIT_S)
    assert failures._wait_s("b", 0.0) == key_gate.FIRST_WAIT_S
    assert failures._wait_s("a", key_gate.FORGOTTEN_S + 1) == key_gate.FIRST_WAIT_S


def test_failures_of_many_addresses_take_bounded_memory() -> None:
    failures = Failures()
    for number in range(2 * key_gate.ADDRESSES):
        failures._wait_s(f"{number}", 0.0)
    assert len(failures._counts) == key_gate.ADDRESSES


async def test_the_number_of_delayed_rejections_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_gate, "WAITING", 0)
    slept: list[float] = []
    monkeypatch.setattr(key_gate, "asyncio", SimpleNamespace(sleep=slept.append))
    await Failures().slow_down("a")
    assert not slept
