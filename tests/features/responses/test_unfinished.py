"""Background responses that run or were cancelled: their items, and how calls continue them."""

import json
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features.gate import ANYONE
from kvroute.features.responses.response_routes import routes
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.application import _refuse
from tests.features.responses.stored_conversations import side_of, stored_conversations
from tests.features.responses.test_background import MB, Router, endless, running

HI, MORE = ({"role": "user", "content": text} for text in ("Hi", "More"))


def side(client: Redis, router: Router) -> RouterResponses:
    responses = Responses(
        client, "m", unreadable=Unreadable(), limit_bytes=16 * MB, ttl_s=60, max_bytes=MB
    )
    return side_of(stored_conversations(client, responses), router.store)


async def input_of(side: RouterResponses, previous_id: str) -> Any:
    """Return the input that a replica gets of a call that continues a response."""
    asked = {"input": [MORE], "previous_response_id": previous_id}
    expanded = await side.expand(parse_call(RESPONSES, json.dumps(asked).encode()))
    return json.loads(expanded.call.raw)["input"]


async def test_one_that_was_cancelled_can_be_continued(empty_redis: Redis) -> None:
    router = Router(empty_redis, "one", endless)
    own = side(empty_redis, router)
    async with running(router):
        first = await router.create(input="Hi")
        with pytest.raises(ApiError, match="its status is queued") as error:
            await input_of(own, first)
        assert (error.value.status, error.value.param) == (400, "previous_response_id")
        await router.service.cancel(await router.found(first))
        second = await router.create(input=[MORE], previous_response_id=first)
        await router.service.cancel(await router.found(second))
        # The second one is continued first, so both are stored by one call.
        assert await input_of(own, second) == [HI, MORE, MORE]
        assert await input_of(own, first) == [HI, MORE]
        assert own.conversations
        assert await own.conversations.input_items(second, "") == [HI, MORE]
        stored = json.loads(await own.conversations.responses.get(second, "") or b"")
        assert (stored["id"], stored["status"]) == (second, "cancelled")


async def test_its_references_are_the_items_that_they_name(empty_redis: Redis) -> None:
    router = Router(empty_redis, "one", endless)
    own = side(empty_redis, router)
    assert own.conversations
    objects = own.conversations.objects
    (item,) = await objects.items((await objects.create([HI], {}, ""))["id"], "")
    named = {**HI, "id": item["id"]}
    async with running(router):
        id_ = await router.create(input=[{"id": item["id"]}, MORE])
        await router.service.cancel(await router.found(id_))
        assert own.unfinished
        record = await router.found(id_)
        assert await own.unfinished.input_items(record, ANYONE) == [named, MORE]
        assert await input_of(own, id_) == [named, MORE, MORE]


async def test_one_that_continues_a_lost_response_is_lost(empty_redis: Redis) -> None:
    router = Router(empty_redis, "one", endless)
    own = side(empty_redis, router)
    async with running(router):
        id_ = await router.create(previous_response_id="resp_gone")
        await router.service.cancel(await router.found(id_))
        for lost in (id_, "resp_gone"):
            with pytest.raises(ApiError, match="not found") as error:
                await input_of(own, lost)
            assert error.value.code == "previous_response_not_found"


async def test_its_input_items_are_listed_while_it_runs(empty_redis: Redis) -> None:
    router = Router(empty_redis, "one", endless)
    own, http = side(empty_redis, router), FastAPI()
    model = SimpleNamespace(feature=lambda kind: own)

    async def find(*_: object) -> Any:
        return model

    http.state.models = SimpleNamespace(all=[model], find=find)
    http.state.services = {"responses": router.service}
    http.include_router(routes)
    http.exception_handler(ApiError)(_refuse)
    transport = httpx.ASGITransport(http)
    async with (
        running(router),
        httpx.AsyncClient(transport=transport, base_url="http://r") as client,
    ):
        first = await router.create(input="Hi")
        await router.service.cancel(await router.found(first))
        second = await router.create(input=[MORE], previous_response_id=first)
        for id_, texts in ((first, ["Hi"]), (second, ["Hi", "More"])):
            listed = await client.get(f"/v1/responses/{id_}/input_items", params={"order": "asc"})
            assert [item["content"][0]["text"] for item in listed.json()["data"]] == texts
        missing = await client.get("/v1/responses/resp_gone/input_items")
        assert missing.status_code == 404
