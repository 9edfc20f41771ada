"""What a replica is asked when a conversation goes on, and what of its response is stored."""

import json
import time
from typing import Any

import pytest
from fastapi import Response
from fastapi.responses import StreamingResponse
from redis.asyncio import Redis
from starlette.types import Message

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.call_limits import MAX_ITEMS, MAX_VALUES
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.store.connection import connect
from tests.features.responses.stored_conversations import finished, side_of, stored_conversations

MB = 1 << 20
NOWHERE = "redis://127.0.0.1:1"
SHORT_S = 4.5  # less than a call to a Redis that hangs takes
USER = {"role": "user", "content": "Hi"}


def message(text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": "msg_1", "type": "message", "role": "assistant", "content": [part]}


def responses(client: Redis, *, max_bytes: int = MB) -> Responses:
    return Responses(
        client, "m", unreadable=Unreadable(), limit_bytes=16 * MB, ttl_s=60, max_bytes=max_bytes
    )


@pytest.fixture
def conversations(empty_redis: Redis) -> Conversations:
    return stored_conversations(empty_redis, responses(empty_redis))


async def ask(conversations: Conversations | None, **body: Any) -> Expanded:
    return await side_of(conversations).expand(parse_call(RESPONSES, json.dumps(body).encode()))


async def refused(conversations: Conversations | None, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as error:
        await ask(conversations, **body)
    return error.value


def body_of(turn: Expanded) -> Any:
    return json.loads(turn.call.raw)


async def answer(turn: Expanded, id_: str, *output: dict[str, Any], **more: Any) -> Any:
    """The whole response that the client gets."""
    given = {"id": id_, "output": output, "previous_response_id": None, **more}
    response = await finished(turn, Response(json.dumps(given), media_type="application/json"))
    assert response.headers["content-length"] == str(len(response.body))
    return json.loads(bytes(response.body))


async def test_a_replica_gets_all_that_was_said(conversations: Conversations) -> None:
    first = await ask(conversations, input="Hi", instructions="Be brief.", model="m")
    assert body_of(first) == {"input": "Hi", "instructions": "Be brief.", "model": "m"}
    await answer(first, "resp_1", message("Ho"))
    second = await ask(
        conversations, input=[{"role": "user", "content": "And?"}], previous_response_id="resp_1"
    )
    said = [USER, message("Ho"), {"role": "user", "content": "And?"}]
    assert body_of(second) == {"input": said}
    assert (await answer(second, "resp_2", message("So.")))["previous_response_id"] == "resp_1"
    third = await ask(conversations, previous_response_id="resp_2", stream=True)
    assert body_of(third) == {"input": [*said, message("So.")], "stream": True}
    assert [turn.has_more_messages for turn in (first, second, third)] == [False, True, True]


async def test_numbers_and_texts_come_as_they_were_sent(conversations: Conversations) -> None:
    item = '{"role": "user", "content": "\\u00e9é", "n": 12345678901234567890123, "x": 1.50}'
    raw = f'{{"input": [{item}]}}'.encode()
    await answer(await conversations.expand(parse_call(RESPONSES, raw)), "resp_1")
    second = await ask(conversations, input="a", previous_response_id="resp_1")
    assert item.encode() in second.call.raw


@pytest.mark.parametrize("given", [{"store": False}, {"store": "no"}])
async def test_what_is_not_to_be_stored_is_not(
    conversations: Conversations, given: dict[str, Any]
) -> None:
    first = await ask(conversations, input="Hi", **given)
    body: Any = {"id": "resp_1", "output": [], "previous_response_id": None}
    assert await answer(first, "resp_1") == body
    error = await refused(conversations, input="a", previous_response_id="resp_1")
    assert (error.status, error.code) == (400, "previous_response_not_found")


@pytest.mark.parametrize("given", [{}, {"store": True}, {"store": None}])
async def test_else_it_is(conversations: Conversations, given: dict[str, Any]) -> None:
    await answer(await ask(conversations, input="Hi", **given), "resp_1", status="incomplete")
    found = await conversations.responses.get("resp_1", "")
    assert found is not None
    assert json.loads(found)["status"] == "incomplete"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"previous_response_id": 5}, "previous_response_id is 5; expected"),
        ({"previous_response_id": "a" * 300}, "up to 256"),
        ({"previous_response_id": "a", "previous_input_messages": []}, "only one of them"),
        ({"previous_response_id": "resp_1", "input": 5}, "input is 5; expected"),
    ],
)
async def test_a_wrong_value_is_named(
    conversations: Conversations, given: dict[str, Any], said: str
) -> None:
    error = await refused(conversations, **{"input": "a", **given})
    assert error.status == 400
    assert said in error.message


async def test_without_a_store_the_option_is_named() -> None:
    error = await refused(None, input="a", previous_response_id="resp_1")
    assert (error.status, error.param) == (400, "previous_response_id")
    assert "--response-store-mb" in error.message
    turn = await ask(None, input="a", store=True)
    assert (turn.finish, body_of(turn)) == (None, {"input": "a", "store": True})


async def test_the_limits_of_a_body_hold_for_the_whole_conversation(empty_redis: Redis) -> None:
    conversations = stored_conversations(empty_redis, responses(empty_redis, max_bytes=50_000))
    many = [USER] * (MAX_ITEMS["input"] - 1)
    values = [{"role": "user", "content": [[0] * (MAX_VALUES - 100)]}]
    long = [{"role": "user", "content": "a" * 49_000}]
    for number, items in enumerate((many, values, long)):
        await answer(await ask(conversations, input=items), f"resp_{number}", message("b" * 2000))
        error = await refused(conversations, input=[USER], previous_response_id=f"resp_{number}")
        assert (error.status, error.code) == (413, "request_too_large")
    assert (await refused(conversations, previous_response_id="x")).status == 400


async def test_without_redis_a_response_is_not_stored_and_the_next_one_waits_for_none() -> None:
    client = connect(NOWHERE)
    store = responses(client)
    conversations = stored_conversations(client, store)
    began_s = time.monotonic()
    assert (await answer(await ask(conversations, input="Hi"), "resp_1"))["id"] == "resp_1"
    assert time.monotonic() - began_s < SHORT_S
    assert store.counts["failed"] == 1
    error = await refused(conversations, input="a", previous_response_id="resp_1")
    assert error.status == 503
    await client.aclose()


async def test_a_redis_that_hangs_holds_up_the_end_for_a_second(empty_redis: Redis) -> None:
    store = responses(empty_redis)
    turn = await ask(stored_conversations(empty_redis, store), input="Hi")
    await empty_redis.client_pause(5000)
    began_s = time.monotonic()
    assert (await answer(turn, "resp_1"))["id"] == "resp_1"
    assert 0.9 < time.monotonic() - began_s < SHORT_S
    assert store.counts["failed"] == 1
    await empty_redis.client_unpause()


async def test_a_response_of_another_kind_is_passed_on(conversations: Conversations) -> None:
    turn = await ask(conversations, input="Hi")
    for body in (b"[]", b"{}", b"no", b'{"id": 5, "output": []}', b'{"id": "a", "output": [1]}'):
        response = await finished(turn, Response(body))
        assert response.body == body
    error = Response(b'{"error": 1}', 400)
    assert (await finished(turn, error)).body == b'{"error": 1}'


async def test_a_stream_is_stored_before_its_client_has_its_end(
    conversations: Conversations,
) -> None:
    await answer(await ask(conversations, input="Hi"), "resp_1", message("Ho"))
    turn = await ask(conversations, input="And?", previous_response_id="resp_1", stream=True)
    body = {"id": "resp_2", "output": [message("So.")], "previous_response_id": None}
    events = [
        event("response.created", {**body, "output": []}),
        b'event: response.output_text.delta\ndata: {"delta":"So."}\n\n',
        event("response.completed", body),
    ]
    headers: list[tuple[bytes, bytes]] = []
    sent: list[bytes] = []
    found: list[bytes | None] = []  # in Redis, when the client gets each part

    async def stream() -> Any:
        for each in events:
            yield each

    async def send(message: Message) -> None:
        headers.extend(message.get("headers", ()))
        if part := message.get("body"):
            sent.append(part)
            found.append(await conversations.responses.get("resp_2", ""))

    async def receive() -> Message:
        raise AssertionError("nobody leaves")

    response = await finished(turn, StreamingResponse(stream(), media_type="text/event-stream"))
    response.headers["x-ratelimit-limit-requests"] = "8"  # as routes do
    await response({"type": "http", "asgi": {"spec_version": "2.4"}}, receive, send)
    assert (b"x-ratelimit-limit-requests", b"8") in headers
    named = b'"previous_response_id":"resp_1"'
    assert [named in part for part in sent] == [True, False, True]
    assert b"".join(sent).replace(named, b'"previous_response_id":null') == b"".join(events)
    assert found[:2] == [None, None]
    assert found[2] is not None
    assert found[2] in sent[2]


def event(kind: str, response: dict[str, Any]) -> bytes:
    body = json.dumps({"type": kind, "response": response}, separators=(",", ":"))
    return f"event: {kind}\ndata: {body}\n\n".encode()


async def test_input_items_are_all_that_was_answered(conversations: Conversations) -> None:
    await answer(await ask(conversations, input="Hi"), "resp_1", message("Ho"))
    turn = await ask(conversations, input=[USER], previous_response_id="resp_1")
    await answer(turn, "resp_2", message("So."))
    assert await conversations.input_items("resp_2", "") == [USER, message("Ho"), USER]
    assert await conversations.input_items("resp_1", "") == [USER]
    assert await conversations.input_items("resp_3", "") is None
