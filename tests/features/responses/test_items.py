"""Items that clients send and no replica knows: references, and encrypted reasoning."""

import json
from typing import Any

import pytest
from fastapi import Response
from msgspec.structs import replace
from openai.types.responses import ResponseReasoningItem
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.gate import Caller
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from tests.features.responses.stored_conversations import (
    MB,
    finished,
    side_of,
    stored_conversations,
    streamed,
)

ANYONE, ADA, BOB = Caller(), Caller("ada", secret="a"), Caller("bob", secret="b")
HI, ASK = {"role": "user", "content": "Hi"}, {"role": "user", "content": "And?"}
THOUGHT = {
    "id": "rs_1",
    "type": "reasoning",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": "Hm."}],
}
INCLUDE: dict[str, Any] = {"include": ["reasoning.encrypted_content"], "store": False}


def said(id_: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"id": id_, "type": "message", "role": "assistant", "content": [part]}


@pytest.fixture
def conversations(empty_redis: Redis) -> Conversations:
    limits: Any = {"limit_bytes": 16 * MB, "ttl_s": 60, "max_bytes": MB}
    return stored_conversations(
        empty_redis, Responses(empty_redis, "m", unreadable=Unreadable(), **limits)
    )


async def ask(
    conversations: Conversations | None, caller: Caller = ANYONE, **body: Any
) -> Expanded:
    call = parse_call(RESPONSES, json.dumps(body).encode())
    return await side_of(conversations).expand(replace(call, caller=caller))


def input_of(turn: Expanded) -> Any:
    return json.loads(turn.call.raw)["input"]


async def answer(turn: Expanded, id_: str, *output: dict[str, Any]) -> Any:
    given = {"id": id_, "output": output, "previous_response_id": None}
    return json.loads(bytes((await finished(turn, Response(json.dumps(given)))).body))


@pytest.mark.parametrize("kind", [{"type": "item_reference"}, {"type": None}, {}])
async def test_a_reference_is_the_item_that_it_names(
    conversations: Conversations, kind: dict[str, Any]
) -> None:
    first = await ask(conversations, input=[HI, {**ASK, "id": "msg_ask"}])
    await answer(first, "resp_1", THOUGHT, said("msg_1", "Ho"))
    names = ("msg_ask", "rs_1", "msg_1")
    references = [{"id": id_, **kind} for id_ in names]
    items = [{**ASK, "id": "msg_ask"}, THOUGHT, said("msg_1", "Ho")]
    alone = await ask(conversations, input=[HI, *references, references[0], ASK])
    assert input_of(alone) == [HI, *items, ASK]
    assert alone.call.body["input"] == input_of(alone)
    for again in (references, items):  # what the conversation has already is not said twice
        later = await ask(conversations, input=[*again, ASK], previous_response_id="resp_1")
        assert input_of(later) == [HI, *items, ASK]
    await answer(later, "resp_2", said("msg_2", "So."))
    third = await ask(conversations, input=[{"id": "msg_2", **kind}])
    assert input_of(third) == [said("msg_2", "So.")]


async def test_a_reference_finds_items_of_conversations_and_listed_ones(
    conversations: Conversations,
) -> None:
    objects = conversations.objects
    id_ = (await objects.create([HI], {}, ""))["id"]
    (listed,) = await objects.items(id_, "")
    turn = await ask(conversations, input=[{"id": listed["id"]}])
    assert input_of(turn) == [{**HI, "id": listed["id"]}]
    turn = await ask(conversations, input="Hi", conversation=id_, store=False)
    await answer(turn, "resp_1", said("msg_1", "Ho"))
    assert input_of(await ask(conversations, input=[{"id": "msg_1"}])) == [said("msg_1", "Ho")]
    await objects.delete_item(id_, "msg_1", "")
    with pytest.raises(ApiError, match='"msg_1" not found'):
        await ask(conversations, input=[{"id": "msg_1"}])
    await answer(await ask(conversations, input=[HI, ASK]), "resp_2", said("msg_2", "Ho"))
    turn = await ask(conversations, input=[{"id": "msg_resp_2_1"}])
    assert input_of(turn) == [{**ASK, "id": "msg_resp_2_1"}]


@pytest.mark.parametrize("id_", ["msg_none", "msg_1", "msg_resp_1_7", "msg_resp_1_0"])
@pytest.mark.parametrize("caller", [ANYONE, BOB])
async def test_an_item_that_is_not_stored_for_the_tenant_is_named(
    conversations: Conversations, id_: str, caller: Caller
) -> None:
    await answer(await ask(conversations, ADA, input=[HI]), "resp_1", said("msg_1", "Ho"))
    with pytest.raises(ApiError) as refused:
        await ask(conversations, caller, input=[HI, {"type": "item_reference", "id": id_}])
    assert (refused.value.status, refused.value.param) == (404, "input")
    assert f'Item with id "{id_}" not found' in refused.value.message


async def test_a_deleted_or_unstored_item_is_not_found_and_a_wrong_id_is_named(
    conversations: Conversations,
) -> None:
    await answer(await ask(conversations, input=[HI]), "resp_1", said("msg_1", "Ho"))
    await answer(await ask(conversations, input=[HI], store=False), "resp_2", said("msg_2", "Ho"))
    await conversations.responses.delete("resp_1", "")
    for id_ in ("msg_1", "msg_2"):
        with pytest.raises(ApiError, match="not found"):
            await ask(conversations, input=[{"id": id_}])
    with pytest.raises(ApiError, match="start it with --response-store-mb") as refused:
        await ask(None, input=[{"id": "msg_1"}])
    assert refused.value.status == 404
    with pytest.raises(ApiError, match=r"input\[1\] is an item_reference whose id is 5"):
        await ask(conversations, input=[HI, {"type": "item_reference", "id": 5}])


async def test_references_have_the_limits_of_a_body(conversations: Conversations) -> None:
    for number in range(3):
        turn = await ask(conversations, input=[{"role": "user", "content": "a" * (MB // 2)}])
        await answer(turn, f"resp_{number}", said(f"msg_{number}", "Ho"))
    with pytest.raises(ApiError, match="too long together") as refused:
        await ask(conversations, input=[{"id": f"msg_{number}"} for number in range(3)])
    assert refused.value.status == 413


@pytest.mark.parametrize("stores", [False, True])
async def test_reasoning_comes_back_from_what_a_client_keeps(
    conversations: Conversations, stores: bool
) -> None:
    server = conversations if stores else None
    for caller in (ANYONE, ADA):
        first = await ask(server, caller, input=[HI], **INCLUDE)
        thought, spoken = (await answer(first, "resp_1", THOUGHT, said("msg_1", "Ho")))["output"]
        ResponseReasoningItem.model_validate(thought, strict=True)
        assert "Hm." not in thought["encrypted_content"]
        del thought["content"]  # as Codex does
        second = await ask(server, caller, input=[HI, thought, spoken, ASK], **INCLUDE)
        assert input_of(second) == [HI, THOUGHT, said("msg_1", "Ho"), ASK]


async def test_a_stream_has_encrypted_reasoning_in_its_complete_items() -> None:
    turn = await ask(None, input=[HI], stream=True, **INCLUDE)
    response = {"id": "resp_1", "output": [THOUGHT, said("msg_1", "Ho")]}
    given: list[tuple[str, dict[str, Any]]] = [
        ("response.output_item.added", {"item": {**THOUGHT, "content": []}}),
        ("response.reasoning_text.delta", {"delta": '"reasoning"'}),
        ("response.output_item.done", {"item": THOUGHT}),
        ("response.output_item.done", {"item": said("msg_1", "Ho")}),
        ("response.completed", {"response": response}),
    ]
    got = await streamed(turn, given)
    assert got[:2] + got[3:4] == [{"type": kind, **more} for kind, more in given[:2] + given[3:4]]
    for item in (got[2]["item"], got[4]["response"]["output"][0]):
        assert item.pop("encrypted_content")
        assert item == THOUGHT
        again = await ask(None, input=[{**item, "encrypted_content": "gAAAAA"}])
        assert input_of(again) == [THOUGHT]  # the plain text is enough


async def test_a_stored_response_that_continues_has_no_ciphertext(
    conversations: Conversations,
) -> None:
    first = await ask(conversations, input=[HI], include=INCLUDE["include"])
    shown = await answer(first, "resp_1", THOUGHT)
    assert shown["output"][0]["encrypted_content"]
    found = await conversations.responses.get("resp_1", "")
    assert found is not None
    assert json.loads(found) == shown
    second = await ask(conversations, input=[ASK], previous_response_id="resp_1")
    assert input_of(second) == [HI, THOUGHT, ASK]


FOREIGN = {"type": "reasoning", "id": "rs_2", "encrypted_content": "gAAAAABforeign"}
SUMMARY = [{"type": "summary_text", "text": text} for text in ("One.", "Two.")]


@pytest.mark.parametrize(
    ("item", "read"),
    [
        ({"summary": SUMMARY}, [{"type": "reasoning_text", "text": "One.\n\nTwo."}]),
        ({"summary": SUMMARY, "content": THOUGHT["content"]}, THOUGHT["content"]),
        (
            {"summary": SUMMARY, "content": None},
            [{"type": "reasoning_text", "text": "One.\n\nTwo."}],
        ),
        ({"summary": []}, None),
        ({}, None),
        (
            {"summary": SUMMARY, "encrypted_content": "é"},
            [{"type": "reasoning_text", "text": "One.\n\nTwo."}],
        ),
    ],
)
async def test_foreign_reasoning_is_replaced_by_its_summary(
    item: dict[str, Any], read: list[Any] | None
) -> None:
    turn = await ask(None, input=[HI, {**FOREIGN, **item}, ASK])
    _, *between, _ = input_of(turn)
    assert [each["content"] for each in between] == ([] if read is None else [read])
    assert all("encrypted_content" not in each for each in between)


async def test_no_tenant_reads_the_reasoning_of_another() -> None:
    first = await ask(None, ADA, input=[HI], cache_salt="s", **INCLUDE)
    (thought,) = (await answer(first, "resp_1", THOUGHT))["output"]
    del thought["content"]
    for caller, salt in ((ADA, "s"), (ADA, "t"), (ADA, None), (BOB, "s"), (ANYONE, "s")):
        turn = await ask(None, caller, input=[HI, thought], cache_salt=salt)
        is_own = (caller, salt) == (ADA, "s")
        assert input_of(turn) == ([HI, THOUGHT] if is_own else [HI])


async def test_numbers_beside_a_reference_stay_as_they_were_sent() -> None:
    item = '{"role": "user", "content": "a", "n": 1.50}'
    raw = f'{{"input": [{item}, {json.dumps(FOREIGN)}]}}'.encode()
    turn = await side_of(None).expand(parse_call(RESPONSES, raw))
    assert turn.call.raw == f'{{"input":[{item}]}}'.encode()
