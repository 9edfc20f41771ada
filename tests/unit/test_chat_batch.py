"""A body with several chats becomes one call for each chat, and the answers become one response."""

import asyncio
import json
from typing import Any

import pytest
from fastapi import Response

from kvroute.router.api.call_limits import MAX_CHOICES
from kvroute.router.api.calls import CHAT_COMPLETIONS, COMPLETIONS, INVOCATIONS, parse_invocation
from kvroute.router.api.chat_list import parse_chat_batch
from kvroute.router.api.errors import ApiError
from kvroute.router.dispatch.chat_batch import run_together

HELLO, BYE = [{"role": "user", "content": "Hello"}], [{"role": "user", "content": "Bye"}]


def test_each_conversation_is_a_chat_with_all_other_fields() -> None:
    raw = json.dumps({"messages": [HELLO, BYE], "seed": 10**18, "top_p": 0.5, "n": "1"}).encode()
    calls = parse_chat_batch(b"\xef\xbb\xbf" + raw)
    assert [call.path for call in calls] == [CHAT_COMPLETIONS, CHAT_COMPLETIONS]
    assert [call.body["messages"] for call in calls] == [HELLO, BYE]
    assert {(call.body["seed"], call.body["top_p"]) for call in calls} == {(10**18, 0.5)}


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("messages", {}),
        ("messages", {"messages": []}),
        ("messages", {"messages": HELLO}),
        ("messages", {"messages": [HELLO, []]}),
        ("messages", {"messages": [HELLO] * (MAX_CHOICES + 1)}),
        ("n", {"messages": [HELLO], "n": 2}),
        ("stream", {"messages": [HELLO], "stream": True}),
        ("tools", {"messages": [HELLO], "tools": [{"type": "function"}]}),
        (None, {"messages": [HELLO] * 100, "metadata": {"a": "b" * 200_000}}),
    ],
)
def test_an_invalid_batch_is_refused_with_the_name_of_its_field(
    field: str | None, body: dict[str, Any]
) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat_batch(json.dumps(body).encode())
    assert refused.value.param == field
    assert refused.value.status == (413 if field is None else 400)


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": HELLO}, CHAT_COMPLETIONS),
        ({"prompt": "Hello"}, COMPLETIONS),
        ({"prompt_embeds": "AAAA"}, COMPLETIONS),
        ({"input": "Hello"}, INVOCATIONS),
    ],
)
def test_an_invocation_is_a_call_of_the_route_that_has_its_fields(
    body: dict[str, Any], path: str
) -> None:
    assert parse_invocation(json.dumps(body).encode()).path == path


def answer(text: str, *, replica: str, queued_s: str) -> Response:
    body = {
        "id": "chatcmpl-r-0",
        "choices": [{"index": 0, "message": {"content": text}}],
        "usage": {"prompt_tokens": 3, "prompt_tokens_details": {"cached_tokens": 1}},
        "kvroute_receipts": [text],
    }
    headers = {
        "x-kvroute-replica": replica,
        "x-kvroute-expected-tokens": "16",
        "x-kvroute-queued-s": queued_s,
        "x-kvroute-queued-for": "busy" if float(queued_s) else "none",
    }
    return Response(json.dumps(body), headers=headers)


async def done(response: Response) -> Response:
    return response


async def test_the_answers_are_one_response_in_the_order_of_the_conversations() -> None:
    first = answer("one", replica="a", queued_s="0.000")
    second = answer("two", replica="b", queued_s="1.500")
    response = await run_together([done(first), done(second)], id_="r")
    assert json.loads(bytes(response.body)) == {
        "id": "chatcmpl-r",
        "choices": [
            {"index": 0, "message": {"content": "one"}},
            {"index": 1, "message": {"content": "two"}},
        ],
        "usage": {"prompt_tokens": 6, "prompt_tokens_details": {"cached_tokens": 2}},
        "kvroute_receipts": ["one", "two"],
    }
    assert response.headers["x-kvroute-replica"] == "a,b"
    assert response.headers["x-kvroute-expected-tokens"] == "32"
    assert response.headers["x-kvroute-queued-s"] == "1.500"
    assert response.headers["x-kvroute-queued-for"] == "busy"


async def test_an_error_of_one_chat_is_the_response() -> None:
    refusal = Response(b'{"error": {}}', 400)
    whole = answer("one", replica="a", queued_s="0.000")
    assert await run_together([done(whole), done(refusal)], id_="r") is refusal


async def test_the_other_chats_end_when_one_cannot_run() -> None:
    ended: list[str] = []

    async def runs() -> Response:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append("runs")
        return Response()

    async def fails() -> Response:
        raise ApiError(503, "no replica")

    with pytest.raises(ApiError):
        await run_together([runs(), fails()], id_="r")
    assert ended == ["runs"]
