"""OpenAI's conversations over HTTP, as OpenAI's client uses them, on a real Redis."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx2
import openai
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from openai import AsyncOpenAI
from redis.asyncio import Redis
from starlette.responses import Response

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.conversation_routes import routes
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.bodies import Bodies
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.application import _refuse
from tests.features.responses.stored_conversations import (
    MB,
    conversation_objects,
    finished,
    models_with,
    side_of,
    stored_conversations,
)
from tests.support.workloads import user

TEXT = {"type": "output_text", "text": "a"}
ANSWER = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Ho", "annotations": []}],
}


def model_of(client: Redis, **limits: int) -> Conversations:
    responses = Responses(
        client, "m", unreadable=Unreadable(), limit_bytes=16 * MB, ttl_s=60, max_bytes=MB
    )
    return stored_conversations(client, responses, **limits)


@asynccontextmanager
async def client_of(*models: Conversations | None) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of a router with these models."""
    app: Any = FastAPI()
    app.state.models = models_with(*models)
    app.state.bodies = Bodies(limit_mb=1)
    app.include_router(routes)
    app.exception_handler(ApiError)(_refuse)
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(app))
    url = "http://router/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http) as client:
        yield client
    await app.state.bodies.close()


async def expanded(model: Conversations | None, **body: Any) -> Expanded:
    return await side_of(model).expand(parse_call(RESPONSES, json.dumps(body).encode()))


async def answer(turn: Expanded, id_: str = "resp_1") -> Any:
    """Answer a turn with ANSWER, and return the response that its client gets."""
    given = {"id": id_, "output": [ANSWER], "previous_response_id": None}
    return json.loads(bytes((await finished(turn, Response(json.dumps(given)))).body))


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


async def test_a_conversation_is_created_changed_and_deleted(empty_redis: Redis) -> None:
    async with client_of(None, model_of(empty_redis)) as client:
        created = await client.conversations.create(
            items=[{"type": "message", "role": "user", "content": "Hi"}], metadata={"a": "b"}
        )
        assert created.id.startswith("conv_")
        assert (created.object, created.metadata) == ("conversation", {"a": "b"})
        assert await client.conversations.retrieve(created.id) == created
        changed = await client.conversations.update(created.id, metadata={"c": "d"})
        assert changed == created.model_copy(update={"metadata": {"c": "d"}})
        assert await client.conversations.retrieve(created.id) == changed
        items = await client.conversations.items.list(created.id)
        assert texts(items.data) == ["Hi"]
        deleted = await client.conversations.delete(created.id)
        assert deleted.to_dict() == {
            "id": created.id,
            "object": "conversation.deleted",
            "deleted": True,
        }
        for again in (client.conversations.retrieve, client.conversations.delete):
            with pytest.raises(openai.NotFoundError, match="has expired, was deleted"):
                await again(created.id)


async def test_items_are_added_found_and_deleted(empty_redis: Redis) -> None:
    async with client_of(model_of(empty_redis)) as client:
        id_ = (await client.conversations.create()).id
        given: Any = [
            {"type": "message", "role": "user", "content": "Which weather?"},
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1", "output": "Snow."},
            {"id": "msg_own", "type": "message", "role": "assistant", "content": "It snows."},
        ]
        added = await client.conversations.items.create(id_, items=given)
        prefixes = [f"{item.id}".partition("_")[0] for item in added.data]
        assert prefixes == [
            "msg",
            "fc",
            "item",
            "msg",
        ]
        assert added.data[3].id == "msg_own"
        listed = await client.conversations.items.list(id_, order="asc", limit=3)
        assert (listed.data, listed.has_more) == (added.data[:3], True)
        found = await client.conversations.items.retrieve("msg_own", conversation_id=id_)
        assert found == added.data[3]
        left = await client.conversations.items.delete("msg_own", conversation_id=id_)
        assert left.id == id_
        with pytest.raises(openai.NotFoundError, match="lists its items"):
            await client.conversations.items.retrieve("msg_own", conversation_id=id_)
        assert (await client.conversations.items.list(id_)).data == added.data[2::-1]


STEPS = st.lists(
    st.one_of(st.lists(st.text(min_size=1), min_size=1, max_size=3), st.integers(0, 20)),
    max_size=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
@given(steps=STEPS)
async def test_a_conversation_is_the_list_of_what_was_added_and_not_deleted(
    empty_redis: Redis, steps: list[list[str] | int]
) -> None:
    """A list of texts is added; a number deletes the item with this index."""
    async with client_of(model_of(empty_redis)) as client:
        conversation = (await client.conversations.create()).id
        expected: list[tuple[str, str]] = []
        for step in steps:
            if isinstance(step, list):
                items: Any = [{"role": "user", "content": text} for text in step]
                added = await client.conversations.items.create(conversation, items=items)
                expected += zip([f"{item.id}" for item in added.data], step, strict=True)
            elif step < len(expected):
                id_, _ = expected.pop(step)
                await client.conversations.items.delete(id_, conversation_id=conversation)
        found = [item async for item in client.conversations.items.list(conversation, order="asc")]
        assert [item.id for item in found] == [id_ for id_, _ in expected]
        assert texts(found) == [text for _, text in expected]


async def test_what_two_routers_add_at_the_same_time_is_all_there(empty_redis: Redis) -> None:
    one, other = conversation_objects(empty_redis), conversation_objects(empty_redis)
    async with client_of(model_of(empty_redis)) as client:
        id_ = (await client.conversations.create()).id
        items = [user(f"{number}") for number in range(6)]
        await asyncio.gather(
            *(
                (one, other)[number % 2].append(id_, "", item, json.dumps(item).encode())
                for number, item in enumerate(items)
            )
        )
        found = (await client.conversations.items.list(id_)).data
        assert sorted(texts(found)) == [f"{number}" for number in range(6)]


@pytest.mark.parametrize("is_object", [False, True])
async def test_a_response_reads_and_extends_its_conversation(
    empty_redis: Redis, is_object: bool
) -> None:
    model = model_of(empty_redis)
    async with client_of(model) as client:
        first: Any = {"type": "message", "role": "user", "content": "My name is Ada."}
        id_ = (await client.conversations.create(items=[first])).id
        given = {"id": id_} if is_object else id_
        turn = await expanded(model, input="Hi", conversation=given)
        body = json.loads(turn.call.raw)
        assert body == {"input": [first, {"role": "user", "content": "Hi"}]}
        assert (await answer(turn))["conversation"] == {"id": id_}
        found = (await client.conversations.items.list(id_, order="asc")).data
        assert texts(found) == ["My name is Ada.", "Hi", "Ho"]
        # A later response can continue this response, too.
        later = json.loads(
            (await expanded(model, input="So?", previous_response_id="resp_1")).call.raw
        )
        assert [item["content"] for item in later["input"]][:2] == ["My name is Ada.", "Hi"]
        assert len(later["input"]) == 4


async def test_a_streamed_response_extends_its_conversation(empty_redis: Redis) -> None:
    model = model_of(empty_redis)
    async with client_of(model) as client:
        id_ = (await client.conversations.create()).id
        turn = await expanded(model, input="Hi", conversation=id_, store=False)
        response = {"id": "resp_1", "output": [ANSWER], "previous_response_id": None}
        data = json.dumps({"response": response}, separators=(",", ":"))
        event = f"event: response.completed\ndata: {data}\n\n".encode()
        whole = await finished(turn, StreamingResponse(iter([event])))
        sent = list[Any]()

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            await asyncio.Event().wait()

        await whole({"type": "http"}, receive, send)
        (body,) = (message["body"] for message in sent if message.get("body"))
        shown = json.loads(body.partition(b"data: ")[2])["response"]
        assert shown["conversation"] == {"id": id_}
        found = (await client.conversations.items.list(id_, order="asc")).data
        assert texts(found) == ["Hi", "Ho"]
    assert await model.responses.get("resp_1", "") is None


async def test_a_conversation_that_is_deleted_meanwhile_costs_no_answer(
    empty_redis: Redis,
) -> None:
    model = model_of(empty_redis)
    async with client_of(model) as client:
        id_ = (await client.conversations.create()).id
        turn = await expanded(model, input="Hi", conversation=id_)
        await client.conversations.delete(id_)
        assert (await answer(turn))["output"] == [ANSWER]
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(id_)


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({"conversation": 5}, 400, "conversation is 5; expected the id"),
        ({"conversation": {"name": "a"}}, 400, "expected the id"),
        ({"conversation": "a" * 300}, 400, "expected the id"),
        ({"conversation": "a", "previous_response_id": "b"}, 400, "send only one of them"),
        ({"conversation": "conv_none"}, 404, "not found"),
    ],
)
async def test_a_wrong_conversation_is_named(
    empty_redis: Redis, body: dict[str, Any], status: int, said: str
) -> None:
    with pytest.raises(ApiError) as refused:
        await expanded(model_of(empty_redis), input="Hi", **body)
    assert (refused.value.status, refused.value.param) == (status, "conversation")
    assert said in refused.value.message


@pytest.mark.parametrize(
    ("items", "said"),
    [
        ([{"role": "user"}], "items[0] is a message whose content is null"),
        ([{"role": "robot", "content": "a"}], 'role is "robot"; expected one of user, assistant'),
        ([user("a")[0], {"role": "assistant", "content": ""}], "items[1] is an assistant message"),
        ([{"role": "assistant", "content": []}], "assistant message without text"),
        ([{"role": "assistant", "content": [TEXT | {"text": ""}]}], "assistant message without"),
        ([{"role": "user", "content": [{"type": "sound"}]}], "whose part content[0] is"),
        ([{"role": "user", "content": [TEXT, {"type": []}]}], "whose part content[1] is"),
        ([{"type": "thought", "text": "Hm."}], 'has the type "thought", which models'),
        ([{"type": "function_call", "call_id": "1", "arguments": "{}"}], "whose name is null"),
        ([{"type": "function_call_output", "call_id": "1"}], "whose output is null"),
        ([{"type": "reasoning", "summary": [], "encrypted_content": "gAAAAA"}], "leave it out"),
        ([{"type": "compaction", "encrypted_content": "gAAAAA"}], "has not made for you"),
        ([{"type": "compaction_trigger"}], 'has the type "compaction_trigger"'),
        ([{"type": "item_reference", "id": 5}], "the id of item 0"),
        ([{"role": "user", "content": "a"}, {"type": 5}], "the type of item 1 is 5"),
        ([{"role": "user", "content": "a", "id": ""}], "the id of item 0"),
        ([{"role": "user", "content": "a"}] * 21, "at most 20 items"),
        ([[]], "items.0 is []"),
        ([{"role": "user", "content": [0] * 100_001}], "more than 100000 JSON values"),
    ],
)
async def test_a_wrong_item_is_named(empty_redis: Redis, items: Any, said: str) -> None:
    async with client_of(model_of(empty_redis)) as client:
        id_ = (await client.conversations.create()).id
        attempts = (client.conversations.create, partial(client.conversations.items.create, id_))
        for attempt in attempts:
            with pytest.raises(openai.BadRequestError) as refused:
                await attempt(items=[], extra_body={"items": items})  # not converted
            assert said in refused.value.body["message"]  # type: ignore[index]


async def test_an_item_that_is_sent_again_with_its_id_is_not_doubled(empty_redis: Redis) -> None:
    model = model_of(empty_redis)
    async with client_of(model) as client:
        given: Any = [{"id": "msg_own", **user("Hi")[0]}, user("And?")[0]]
        id_ = (await client.conversations.create(items=given[:1])).id
        added = (await client.conversations.items.create(id_, items=given)).data
        assert (added[0].id, texts(added)) == ("msg_own", ["Hi", "And?"])
        history = json.loads((await expanded(model, input="So?", conversation=id_)).call.raw)
        assert [item["content"] for item in history["input"]] == ["Hi", "And?", "So?"]
        # A client that keeps the history sends all of it again.
        listed = await client.conversations.items.list(id_, order="asc")
        again = [item.to_dict() for item in listed.data]
        turn = await expanded(model, input=[*again, *user("So?")], conversation=id_)
        assert json.loads(turn.call.raw) == history
        await answer(turn)
        found = (await client.conversations.items.list(id_, order="asc")).data
        assert texts(found) == ["Hi", "And?", "So?", "Ho"]


async def test_metadata_has_openais_limits(empty_redis: Redis) -> None:
    async with client_of(model_of(empty_redis)) as client:
        for metadata in (
            {"": "a"},
            {"k" * 65: "a"},
            {"a": "v" * 513},
            {f"{n}": "" for n in range(17)},
        ):
            with pytest.raises(openai.BadRequestError):
                await client.conversations.create(metadata=metadata)


async def test_a_conversation_cannot_grow_without_end(empty_redis: Redis) -> None:
    async with client_of(model_of(empty_redis, max_bytes=20_000)) as client:
        id_ = (await client.conversations.create()).id
        items: Any = [{"role": "user", "content": "word " * 1000}]
        for _ in range(3):
            await client.conversations.items.create(id_, items=items)
        with pytest.raises(openai.APIStatusError, match="start a new conversation") as refused:
            await client.conversations.items.create(id_, items=items)
        assert refused.value.status_code == 413
        assert len((await client.conversations.items.list(id_)).data) == 3


async def test_a_conversation_is_found_with_its_salt_only(empty_redis: Redis) -> None:
    async with client_of(model_of(empty_redis)) as client:
        salted: Any = {"extra_query": {"cache_salt": "own"}}
        id_ = (await client.conversations.create(**salted)).id
        with pytest.raises(openai.NotFoundError):
            await client.conversations.retrieve(id_)
        assert (await client.conversations.retrieve(id_, **salted)).id == id_


async def test_without_a_store_the_option_is_named() -> None:
    async with client_of(None) as client:
        with pytest.raises(openai.NotFoundError, match="--response-store-mb"):
            await client.conversations.create()
    with pytest.raises(ApiError, match="--response-store-mb"):
        await expanded(None, input="Hi", conversation="conv_1")
