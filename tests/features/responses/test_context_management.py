"""With `context_management`, a long prompt is summarized before it is answered."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import Response
from redis.asyncio import Redis

from kvroute.contract.unreadable import Unreadable
from kvroute.features.expanded import Expanded
from kvroute.features.responses.continuing import Conversations
from kvroute.features.responses.items import context_management
from kvroute.features.responses.items.compaction import COMPACT, OPENING, PROMPT
from kvroute.features.responses.router_responses import RouterResponses
from kvroute.features.responses.stores.response_store import Responses
from kvroute.router.api.calls import INPUT_TOKENS, RESPONSES, Call, parse_call
from kvroute.router.api.errors import ApiError
from tests.features.responses.stored_conversations import (
    MB,
    finished,
    side_of,
    stored_conversations,
    streamed,
)
from tests.support.workloads import user

LIMIT: dict[str, Any] = {"context_management": [{"type": "compaction", "compact_threshold": 100}]}
CONTEXT = 1000  # the model's, in tokens


def said(id_: str, text: str) -> dict[str, Any]:
    part = {"type": "output_text", "text": text, "annotations": []}
    return {"type": "message", "id": id_, "role": "assistant", "content": [part]}


HISTORY: list[Any] = [*user("List."), said("msg_1", "a.py"), *user("And?")]


class Model:
    """A model whose prompts have so many tokens, and which writes this summary."""

    def __init__(self, side: RouterResponses, tokens: int, status: int = 200) -> None:
        self.side = side
        self.asked = list[str]()  # the paths of the calls that were made for a call
        self._tokens, self._status = tokens, status

    async def answer(self, call: Call, request: Any, entry: Any, *, id_: str) -> Response:
        self.asked.append(call.path)
        assert "context_management" not in json.loads(call.raw)
        if call.path == INPUT_TOKENS:
            return Response(json.dumps({"input_tokens": self._tokens}))
        assert call.path == COMPACT
        assert json.loads(call.raw)["max_output_tokens"] == self._tokens // 2
        turn = await self.side.expand(call)
        assert json.loads(turn.call.raw)["input"][-1] == user(PROMPT)[0]
        given = {"id": "resp_0", "output": [said("msg_0", "Listed.")]}
        return await finished(turn, Response(json.dumps(given), self._status))


async def ask(
    monkeypatch: pytest.MonkeyPatch,
    *,
    server: Conversations | None = None,
    tokens: int = 100,
    status: int = 200,
    **body: Any,
) -> tuple[Model, Any]:
    """Return the model, and what the core does with a call: the call that replicas answer."""
    side = side_of(server)
    side.attach(SimpleNamespace(max_model_len=lambda: CONTEXT))  # type: ignore[arg-type]
    model = Model(side, tokens, status)
    monkeypatch.setattr(context_management, "answer", model.answer)
    call = parse_call(RESPONSES, json.dumps(body).encode())
    request: Any = SimpleNamespace(scope={}, state=SimpleNamespace(entry=None), headers={})
    answered = await side.answer(call, request)
    if isinstance(answered, Response):
        return model, answered
    return model, await side.expand(answered or call)


def input_of(turn: Expanded) -> Any:
    return json.loads(turn.call.raw)["input"]


async def answer(turn: Expanded, text: str, id_: str = "resp_1") -> Any:
    given = {"id": id_, "output": [said("msg_2", text)], "previous_response_id": None}
    return json.loads(bytes((await finished(turn, Response(json.dumps(given)))).body))


SUMMARIZED = [*user("List."), *user("And?"), *user(f"{OPENING}Listed.")]


async def test_a_prompt_above_the_threshold_is_answered_from_its_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, turn = await ask(monkeypatch, input=HISTORY, **LIMIT)
    assert model.asked == [INPUT_TOKENS, COMPACT]
    assert (turn.call.path, input_of(turn)) == (RESPONSES, SUMMARIZED)
    item, message = (await answer(turn, "b.py"))["output"]
    assert (item["type"], message) == ("compaction", said("msg_2", "b.py"))
    # A client that keeps the history adds the output to it.
    later = [*HISTORY, item, message, *user("So?")]
    _, turn = await ask(monkeypatch, tokens=99, input=later, **LIMIT)
    assert input_of(turn) == [*SUMMARIZED, message, *user("So?")]


async def test_a_short_prompt_is_answered_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    model, turn = await ask(monkeypatch, tokens=99, input=HISTORY, **LIMIT)
    assert (model.asked, input_of(turn)) == ([INPUT_TOKENS], HISTORY)
    assert len((await answer(turn, "b.py"))["output"]) == 1
    unset: list[dict[str, Any]] = [{}, {"context_management": []}, {"context_management": None}]
    for more in unset:
        model, turn = await ask(monkeypatch, tokens=999, input=HISTORY, **more)
        assert (model.asked, input_of(turn)) == ([], HISTORY)


async def test_the_limit_of_the_answer_does_not_cut_off_the_summary(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, turn = await ask(monkeypatch, input=HISTORY, max_output_tokens=1, **LIMIT)
    assert model.asked == [INPUT_TOKENS, COMPACT]
    assert json.loads(turn.call.raw)["max_output_tokens"] == 1


@pytest.mark.parametrize(("tokens", "is_compacted"), [(749, False), (750, True)])
async def test_without_a_threshold_three_quarters_of_the_context_are(
    monkeypatch: pytest.MonkeyPatch, tokens: int, is_compacted: bool
) -> None:
    entry = [{"type": "compaction"}]
    model, _ = await ask(monkeypatch, tokens=tokens, input=HISTORY, context_management=entry)
    assert (COMPACT in model.asked) == is_compacted


async def test_a_stored_conversation_goes_on_after_its_compaction(
    monkeypatch: pytest.MonkeyPatch, empty_redis: Redis
) -> None:
    limits: Any = {"limit_bytes": 16 * MB, "ttl_s": 60, "max_bytes": MB}
    responses = Responses(empty_redis, "m", unreadable=Unreadable(), **limits)
    server = stored_conversations(empty_redis, responses)
    conversation = (await server.objects.create([], {}, ""))["id"]
    for given, number in (
        ({"previous_response_id": "resp_1"}, 1),
        (
            {"conversation": conversation},
            2,
        ),
    ):
        first = {} if number == 1 else given
        _, turn = await ask(monkeypatch, server=server, input=HISTORY[:1], **first)
        await answer(turn, "a.py", f"resp_{number}")
        _, turn = await ask(monkeypatch, server=server, input="And?", **given, **LIMIT)
        assert input_of(turn) == SUMMARIZED
        await answer(turn, "b.py", f"resp_{number}2")
        later = {"previous_response_id": "resp_12"} if number == 1 else given
        _, turn = await ask(monkeypatch, server=server, input="So?", **later)
        assert input_of(turn) == [*SUMMARIZED, said("msg_2", "b.py"), *user("So?")]


async def test_a_stream_begins_with_the_summary(monkeypatch: pytest.MonkeyPatch) -> None:
    _, turn = await ask(monkeypatch, input=HISTORY, stream=True, **LIMIT)
    message = said("msg_2", "b.py")
    given: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {"output": []}, "sequence_number": 0}),
        ("response.in_progress", {"response": {"output": []}, "sequence_number": 1}),
        ("response.output_item.added", {"output_index": 0, "sequence_number": 2}),
        ("response.output_item.done", {"output_index": 0, "item": message, "sequence_number": 3}),
        ("response.completed", {"response": {"output": [message]}, "sequence_number": 4}),
    ]
    got = await streamed(turn, given)
    assert [event["sequence_number"] for event in got] == list(range(7))
    assert [event.get("output_index") for event in got] == [None, None, 0, 0, 1, 1, None]
    assert got[6]["response"]["output"] == [got[3]["item"], message]
    assert got[2]["item"] == got[3]["item"]


async def test_a_client_that_asks_for_a_compaction_itself_gets_only_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trigger = {"type": "compaction_trigger"}
    model, turn = await ask(monkeypatch, input=[*HISTORY, trigger], **LIMIT)
    assert (model.asked, input_of(turn)) == ([], [*HISTORY, *user(PROMPT)])


async def test_a_summary_that_cannot_be_made_is_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    _, refused = await ask(monkeypatch, status=429, input=HISTORY, **LIMIT)
    assert refused.status_code == 429


@pytest.mark.parametrize(
    "given",
    [
        {"type": "compaction"},
        [{"type": "truncation"}],
        [5],
        [{"type": "compaction", "compact_threshold": "many"}],
        [{"type": "compaction", "compact_threshold": 0}],
    ],
)
async def test_another_form_is_refused(monkeypatch: pytest.MonkeyPatch, given: Any) -> None:
    with pytest.raises(ApiError, match="expected a") as refused:
        await ask(monkeypatch, input=HISTORY, context_management=given)
    assert (refused.value.status, refused.value.param) == (400, "context_management")
