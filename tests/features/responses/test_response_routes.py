"""Stored responses over HTTP, in OpenAI's shapes and with its errors."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from msgspec.structs import replace
from redis.asyncio import Redis
from starlette.responses import Response

from kvroute.contract.unreadable import Unreadable
from kvroute.features.gate import Caller
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.response_routes import routes
from kvroute.features.responses.stores.response_store import Responses
from kvroute.features.router_service import RouterServices
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.application import _refuse
from kvroute.router.middleware.caller_check import CallerCheck
from kvroute.store.connection import connect
from tests.features.responses.stored_conversations import (
    finished,
    models_with,
    stored_conversations,
)
from tests.support.gates import ClosedGate

MB = 1 << 20


def conversations(client: Redis, model: str) -> Conversations:
    store = Responses(
        client, model, unreadable=Unreadable(), limit_bytes=16 * MB, ttl_s=60, max_bytes=MB
    )
    return stored_conversations(client, store)


def application(
    each: Sequence[Conversations | None], gate: ClosedGate | None = None
) -> httpx.AsyncClient:
    """A client of a router's routes. each: one for each of its models."""
    http: Any = FastAPI()
    http.state.services = RouterServices()
    http.state.models = models_with(*each)
    http.include_router(routes)
    http.exception_handler(ApiError)(_refuse)
    if gate is not None:
        http.add_middleware(CallerCheck, gate=gate, refused=lambda error: None)
    return httpx.AsyncClient(transport=httpx.ASGITransport(http), base_url="http://router")


async def answered(conversations: Conversations, id_: str, **body: Any) -> bytes:
    call = parse_call(RESPONSES, json.dumps(body).encode())
    given = Response(json.dumps({"id": id_, "output": [], "previous_response_id": None}))
    return bytes((await finished(await conversations.expand(call), given)).body)


async def test_each_models_responses_are_found(empty_redis: Redis) -> None:
    models = [conversations(empty_redis, name) for name in ("m", "n")]
    for number, model in enumerate(models):
        body = await answered(model, f"resp_{number}", input="Hi")
        async with application([None, *models]) as client:
            found = await client.get(f"/v1/responses/resp_{number}")
            assert (found.status_code, found.json()) == (200, json.loads(body))
            deleted = await client.delete(f"/v1/responses/resp_{number}")
            expected = {"id": f"resp_{number}", "object": "response", "deleted": True}
            assert deleted.json() == expected
            for again in (client.get, client.delete):
                error = await again(f"/v1/responses/resp_{number}")
                assert error.status_code == 404
                assert f'"resp_{number}"' in error.json()["error"]["message"]


async def test_a_salted_one_is_found_with_its_salt(empty_redis: Redis) -> None:
    model = conversations(empty_redis, "m")
    await answered(model, "resp_1", input="Hi", cache_salt="盐")
    async with application([model]) as client:
        for verb in ("GET", "DELETE"):
            assert (await client.request(verb, "/v1/responses/resp_1")).status_code == 404
            salted = {"cache_salt": "盐"}
            found = await client.request(verb, "/v1/responses/resp_1", params=salted)
            assert found.status_code == 200


async def test_one_of_a_tenant_is_found_with_its_key_only(empty_redis: Redis) -> None:
    a, b = (Caller(tenant, salt=f"salt of {tenant}", secret=f"of {tenant}") for tenant in "ab")
    model = conversations(empty_redis, "m")
    call = parse_call(RESPONSES, b'{"input": "Hi", "cache_salt": "own"}')
    call = replace(call, caller=a)
    given = Response(b'{"id": "resp_1", "output": [], "previous_response_id": null}')
    await finished(await model.expand(call), given)
    async with application([model], ClosedGate(a, b)) as client:
        for salt in ("own", "", f"{call.cache_salt}", call.cache_salt.partition(".")[0]):
            for key in ("b", *("a" if salt != "own" else ())):
                headers, query = {"x-api-key": key}, {"cache_salt": salt}
                for verb, path in (("GET", ""), ("GET", "/input_items"), ("DELETE", "")):
                    found = await client.request(
                        verb, f"/v1/responses/resp_1{path}", params=query, headers=headers
                    )
                    assert found.status_code == 404
        headers, query = {"x-api-key": "a"}, {"cache_salt": "own"}
        found = await client.get("/v1/responses/resp_1", params=query, headers=headers)
        assert found.status_code == 200


async def test_input_items_come_in_pages(empty_redis: Redis) -> None:
    model = conversations(empty_redis, "m")
    items = [{"role": "user", "content": f"{number}"} for number in range(30)]
    await answered(model, "resp_1", input=items)
    seen: list[str] = []
    async with application([model]) as client:
        query: dict[str, Any] = {"limit": 12, "order": "asc"}
        while True:
            page = (await client.get("/v1/responses/resp_1/input_items", params=query)).json()
            seen += [item["content"][0]["text"] for item in page["data"]]
            assert (page["object"], page["first_id"]) == ("list", page["data"][0]["id"])
            if not page["has_more"]:
                break
            query["after"] = page["last_id"]
        assert seen == [item["content"] for item in items]
        newest = (await client.get("/v1/responses/resp_1/input_items")).json()["data"]
        assert [item["content"][0]["text"] for item in newest] == seen[:-21:-1]


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ({"limit": "0"}, "limit is"),
        ({"limit": "101"}, "limit is"),
        ({"limit": "²"}, "limit is"),
        ({"limit": "9" * 5000}, "limit is"),
        ({"order": "up"}, "order is"),
        ({"after": "x"}, "after is"),
    ],
)
async def test_a_wrong_query_is_named(empty_redis: Redis, query: dict[str, str], said: str) -> None:
    model = conversations(empty_redis, "m")
    await answered(model, "resp_1", input="Hi")
    async with application([model]) as client:
        error = await client.get("/v1/responses/resp_1/input_items", params=query)
    assert error.status_code == 400
    assert said in error.json()["error"]["message"]


async def test_a_response_that_did_not_run_in_the_background_has_no_events(
    empty_redis: Redis,
) -> None:
    model = conversations(empty_redis, "m")
    await answered(model, "resp_1", input="Hi")
    async with application([model]) as client:
        refused = await client.get("/v1/responses/resp_1", params={"stream": "true"})
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "stream"
        assert "not created with background=true" in refused.json()["error"]["message"]
        plain = await client.get("/v1/responses/resp_1", params={"stream": "false"})
        assert plain.status_code == 200
        missing = await client.get("/v1/responses/resp_2", params={"stream": "true"})
        assert missing.status_code == 404


async def test_without_a_store_the_option_is_named() -> None:
    async with application([None]) as client:
        for path in ("resp_1", "resp_1/input_items"):
            error = await client.get(f"/v1/responses/{path}")
            assert error.status_code == 404
            assert "--response-store-mb" in error.json()["error"]["message"]


async def test_only_background_responses_can_be_cancelled(empty_redis: Redis) -> None:
    model = conversations(empty_redis, "m")
    await answered(model, "resp_1", input="Hi")
    async with application([model]) as client:
        error = await client.post("/v1/responses/resp_1/cancel")
        assert error.status_code == 400
        assert "has not run in the background" in error.json()["error"]["message"]
        assert (await client.post("/v1/responses/resp_2/cancel")).status_code == 404


async def test_without_redis_the_client_may_try_again() -> None:
    redis = connect("redis://127.0.0.1:1")
    async with application([conversations(redis, "m")]) as client:
        error = await client.get("/v1/responses/resp_1")
    assert (error.status_code, error.headers["retry-after"]) == (503, "1")
    await redis.aclose()
