"""A summary takes the place of the beginning of a conversation, as clients such as Codex ask."""

import json
from typing import Any

import pytest
from fastapi import Response
from msgspec.structs import replace
from openai.types.responses import CompactedResponse, ResponseCompactionItem, ResponseStreamEvent
from pydantic import TypeAdapter
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.gate import Caller
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.items.compaction import COMPACT, OPENING, PROMPT
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.calls import RESPONSES, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.history.readable import LEFT_OUT
from tests.features.responses.stored_conversations import (
    MB,
    finished,
    side_of,
    stored_conversations,
    streamed,
)
from tests.support.workloads import user

TRIGGER = {"type": "compaction_trigger"}
CALL = {"type": "function_call", "call_id": "1", "name": "ls", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "1", "output": "a.py"}
SYSTEM = {"role": "developer", "content": "Be brief."}
TOOLS = [{"type": "function", "name": "ls", "parameters": {}}]
HISTORY: list[Any] = [SYSTEM, *user("List."), CALL, OUTPUT]
KEPT = [SYSTEM, *user("List.")]
USAGE = {
    "input_tokens": 9,
    "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 11,
}


def said(text: str, kind: str = "output_text") -> dict[str, Any]:
    part = {"type": kind, "text": text, "annotations": []}
    is_message = kind == "output_text"
    return {"type": "message" if is_message else "reasoning", "id": "1", "content": [part]}


async def ask(
    server: Conversations | None = None, caller: str = "", path: str = RESPONSES, **body: Any
) -> Expanded:
    call = parse_call(path, json.dumps(body).encode())
    return await side_of(server).expand(replace(call, caller=Caller(caller, secret=caller)))


def body_of(turn: Expanded) -> Any:
    return json.loads(turn.call.raw)


async def answer(turn: Expanded, *output: dict[str, Any], id_: str = "resp_1") -> Any:
    given = {"id": id_, "created_at": 5, "output": output, "previous_response_id": None}
    response = Response(json.dumps({**given, "usage": USAGE}))
    return json.loads(bytes((await finished(turn, response)).body))


async def head(turn: Expanded) -> Any:
    return (await finished(turn, Response('{"id": "resp_1", "output": []}'))).headers


def summary(text: str) -> dict[str, Any]:
    return {"role": "user", "content": f"{OPENING}{text}"}


async def compacted(text: str = "Listed a.py.", caller: str = "") -> dict[str, Any]:
    (item,) = (await answer(await ask(None, caller, input=[*HISTORY, TRIGGER]), said(text)))[
        "output"
    ]
    return dict(item)


async def test_a_trigger_makes_one_item_from_one_generation() -> None:
    codex: Any = {"tool_choice": "auto", "store": False, "text": {"verbosity": "low"}}
    turn = await ask(
        input=[*HISTORY, {**TRIGGER, "id": "x"}],
        tools=TOOLS,
        include=["reasoning.encrypted_content"],
        instructions="You are Codex.",
        **codex,
    )
    assert body_of(turn) == {
        "input": [*HISTORY, *user(PROMPT)],
        "tools": TOOLS,  # so that the prefix stays the same
        "tool_choice": "none",
        "instructions": "You are Codex.",
        "store": False,
    }
    response = await answer(turn, said("Hm.", "reasoning_text"), said("Listed a.py."))
    (item,) = response["output"]
    ResponseCompactionItem.model_validate(item, strict=True)
    assert "a.py" not in item["encrypted_content"]
    assert response["usage"] == USAGE


@pytest.mark.parametrize("kind", ["compaction", "compaction_summary", "context_compaction"])
async def test_later_turns_have_the_summary_instead_of_what_it_replaces(kind: str) -> None:
    item = {**await compacted(), "type": kind}
    turn = await ask(input=[*HISTORY, item, *user("And?")])
    assert body_of(turn)["input"] == [*KEPT, summary("Listed a.py."), *user("And?")]
    assert turn.call.body["input"] == body_of(turn)["input"]
    # A second compaction replaces the first one.
    turn = await ask(input=[*HISTORY, item, *user("And?"), CALL, OUTPUT, TRIGGER])
    before = [*KEPT, summary("Listed a.py."), *user("And?")]
    assert body_of(turn)["input"] == [*before, CALL, OUTPUT, *user(PROMPT)]
    (second,) = (await answer(turn, said("Twice.")))["output"]
    turn = await ask(input=[*HISTORY, item, *user("And?"), second, *user("So?")])
    after = [*KEPT, *user("And?"), summary("Twice."), *user("So?")]
    assert body_of(turn)["input"] == after


async def test_a_summary_of_another_tenant_or_server_is_left_out() -> None:
    own = await compacted(caller="ada")
    for item in (own, {"type": "compaction", "encrypted_content": "gAAAAA"}):
        turn = await ask(None, "bob", input=[*HISTORY, item, *user("And?")])
        assert body_of(turn)["input"] == [*HISTORY, *user("And?")]
        assert (await head(turn))[LEFT_OUT] == "compaction"
    reasoning = {"type": "reasoning", "summary": [], "encrypted_content": own["encrypted_content"]}
    turn = await ask(None, "ada", input=[*HISTORY, reasoning])  # a ciphertext of another kind
    assert body_of(turn)["input"] == HISTORY
    assert (await head(turn))[LEFT_OUT] == "reasoning"
    assert LEFT_OUT not in await head(await ask(None, "ada", input=[*HISTORY, own]))


async def test_a_model_that_only_thinks_has_written_a_summary_too() -> None:
    turn = await ask(input=[*HISTORY, TRIGGER])
    (item,) = (await answer(turn, said("Thought.", "reasoning_text")))["output"]
    turn = await ask(input=[item, *user("And?")])
    assert body_of(turn)["input"] == [summary("Thought."), *user("And?")]


@pytest.mark.parametrize("items", [[TRIGGER, *HISTORY], [TRIGGER, TRIGGER]])
async def test_a_trigger_is_the_last_item(items: list[Any]) -> None:
    with pytest.raises(ApiError, match=r"input\[0\] is a compaction_trigger") as refused:
        await ask(input=items)
    assert refused.value.status == 400


async def test_a_stream_has_the_events_of_the_one_item() -> None:
    turn = await ask(input=[*HISTORY, TRIGGER], stream=True)
    response: dict[str, Any] = {
        "id": "resp_1",
        "object": "response",
        "created_at": 5,
        "model": "m",
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "none",
        "tools": [],
        "metadata": {},
        "temperature": 1.0,
        "top_p": 1.0,
        "error": None,
        "incomplete_details": None,
        "instructions": None,
    }
    message = said("Listed a.py.")
    given: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": response, "sequence_number": 0}),
        ("response.in_progress", {"response": response, "sequence_number": 1}),
        ("response.output_item.added", {"item": said(""), "sequence_number": 2}),
        *[("response.output_text.delta", {"delta": "a", "sequence_number": n}) for n in (3, 4)],
        ("response.output_item.done", {"item": message, "sequence_number": 5}),
        (
            "response.completed",
            {"response": {**response, "output": [message]}, "sequence_number": 6},
        ),
    ]
    got = await streamed(turn, given)
    for number, event in enumerate(got):
        TypeAdapter[Any](ResponseStreamEvent).validate_python(event)
        assert event["sequence_number"] == number
    assert [event["type"].removeprefix("response.") for event in got] == [
        "created",
        "in_progress",
        "output_item.added",
        "compaction.compacting",
        "output_item.done",
        "completed",
    ]
    item = got[4]["item"]
    assert got[5]["response"]["output"] == [item]
    assert {item["id"]} == {got[2]["item"]["id"], got[3]["item_id"]}
    later = await ask(input=[item, *user("And?")])
    assert body_of(later)["input"] == [summary("Listed a.py."), *user("And?")]


async def test_a_stream_that_fails_ends_with_its_error() -> None:
    turn = await ask(input=[*HISTORY, TRIGGER], stream=True)
    error = {"code": "server_error", "message": "lost", "sequence_number": 9}
    got = await streamed(turn, [("response.output_text.delta", {"delta": "a"}), ("error", error)])
    assert [event["type"] for event in got][1:] == ["response.compaction.compacting", "error"]
    assert got[2] == {"type": "error", **error, "sequence_number": 2}


async def test_a_stored_conversation_goes_on_from_its_summary(empty_redis: Redis) -> None:
    limits: Any = {"limit_bytes": 16 * MB, "ttl_s": 60, "max_bytes": MB}
    responses = Responses(empty_redis, "m", unreadable=Unreadable(), **limits)
    server = stored_conversations(empty_redis, responses)
    await answer(await ask(server, input=HISTORY), said("One."))
    turn = await ask(server, input=[TRIGGER], previous_response_id="resp_1")
    assert body_of(turn)["input"][-1] == user(PROMPT)[0]
    await answer(turn, said("Listed."), id_="resp_2")
    turn = await ask(server, input="And?", previous_response_id="resp_2")
    assert body_of(turn)["input"] == [*KEPT, summary("Listed."), *user("And?")]
    window = await ask(server, path=COMPACT, previous_response_id="resp_2", input="And?")
    compacted = await answer(window, said("All."))
    assert [item.get("content", [{}])[0].get("text") for item in compacted["output"]] == [
        *("Be brief.", "List.", "And?"),
        None,
    ]


async def test_the_route_answers_with_the_input_that_goes_on() -> None:
    turn = await ask(path=COMPACT, model="m", input=HISTORY, stream=True, instructions="a")
    assert turn.call.path == RESPONSES
    asked = {"input": [*HISTORY, *user(PROMPT)], "model": "m", "instructions": "a", "store": False}
    assert body_of(turn) == asked
    response = await answer(turn, said("Listed a.py."))
    *kept, item = response["output"]
    compacted = CompactedResponse.model_validate({**response, "output": [item]})  # user messages
    assert (compacted.object, compacted.created_at) == ("response.compaction", 5)
    assert compacted.usage.total_tokens == 11
    assert [each["role"] for each in kept] == ["developer", "user"]
    assert item["type"] == "compaction"
    later = await ask(input=[*response["output"], *user("And?")])
    assert body_of(later)["input"] == [*kept, summary("Listed a.py."), *user("And?")]
    alone = await ask(path=COMPACT, input="Hi")
    assert body_of(alone)["input"] == [*user("Hi"), *user(PROMPT)]
