"""What is sent to an attached server, and what becomes of its response."""

import json
from collections.abc import AsyncIterator, Sequence

import pytest

from kvroute.contract.generation import Chunk
from kvroute.replica.attached_engine.answer import ServerAnswer
from kvroute.replica.attached_engine.server_bodies import (
    CHAT,
    COMPLETIONS,
    MAX_TOKENS,
    MESSAGES,
    RESPONSES,
    ServerUsage,
    forwarded,
    usage_of_body,
)

ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""}}]}\n\n'
WORD = b'data: {"choices":[{"index":0,"delta":{"content":"a \\"role\\":"}}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":40,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":32}}}\n\n'
)
DONE = b"data: [DONE]\n\n"


async def chunks(
    parts: Sequence[bytes],
    *,
    path: str = CHAT,
    content_type: str = "text/event-stream; charset=utf-8",
) -> list[Chunk]:
    received: list[Chunk] = []
    answer = ServerAnswer(path, received.append, 40, 16, 200, content_type)

    async def data() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    await answer.read(data())
    return received


def data_of(received: Sequence[Chunk]) -> bytes:
    return b"".join(chunk.http.data for chunk in received if chunk.http)


def tokens_of(received: Sequence[Chunk]) -> int:
    return sum(len(chunk.token_ids) for chunk in received)


@pytest.mark.parametrize("size", [1, 7, 10_000])
async def test_a_stream_passes_unchanged_whatever_the_pieces(size: int) -> None:
    whole = ROLE + WORD + WORD + WORD + USAGE + DONE
    received = await chunks([whole[at : at + size] for at in range(0, len(whole), size)])
    assert data_of(received) == whole
    assert tokens_of(received) == 3
    assert [chunk.is_last for chunk in received] == [False] * (len(received) - 1) + [True]
    statuses = [chunk.http.status for chunk in received if chunk.http]
    assert statuses == [200] + [0] * (len(received) - 1)


async def test_the_usage_corrects_the_number_of_events() -> None:
    received = await chunks([ROLE, WORD, USAGE, DONE])
    assert tokens_of(received) == 3


async def test_no_other_replica_may_continue_the_answer() -> None:
    received = await chunks([ROLE, WORD, DONE])
    assert not any(chunk.http.can_continue for chunk in received if chunk.http)


async def test_a_whole_response_has_the_servers_cached_tokens() -> None:
    body = json.dumps(
        {
            "choices": [],
            "usage": {"completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 8}},
        },
        separators=(",", ":"),
    ).encode()
    (only,) = await chunks([body[:10], body[10:]], content_type="application/json")
    assert only.http
    assert only.http.data == body
    assert only.http.is_whole
    assert (len(only.token_ids), only.cached_tokens) == (5, 8)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_usage_that_cannot_be_true_costs_nothing(content_type: str) -> None:
    details = {"prompt_tokens_details": {"cached_tokens": 10**9}}
    for tokens in (10**15, -(10**15)):
        usage = json.dumps(
            {"usage": {"completion_tokens": tokens, **details}}, separators=(",", ":")
        )
        data = usage if content_type == "application/json" else f"data: {usage}\n\n"
        received = await chunks([data.encode()], content_type=content_type)
        assert tokens_of(received) <= MAX_TOKENS
        assert all(0 <= chunk.cached_tokens <= 40 for chunk in received)


@pytest.mark.parametrize("content_type", ["application/json", "text/event-stream"])
async def test_a_response_without_an_end_is_given_up(
    content_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvroute.replica.attached_engine.answer.MAX_PIECE", 1_000)
    with pytest.raises(RuntimeError, match="has sent more than 1,000 bytes"):
        await chunks([b"x" * 100] * 11, content_type=content_type)


async def test_an_error_has_no_tokens() -> None:
    (only,) = await chunks([b'{"error":{}}'], content_type="application/json")
    assert only.is_last
    assert not only.token_ids


@pytest.mark.parametrize(
    ("usage", "expected"),
    [
        (
            {"completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}},
            ServerUsage(2, 8),
        ),
        ({"output_tokens": 2, "input_tokens_details": {"cached_tokens": 8}}, ServerUsage(2, 8)),
        ({"output_tokens": 2, "cache_read_input_tokens": 8}, ServerUsage(2, 8)),
        ({"completion_tokens": 2, "prompt_tokens_details": None}, ServerUsage(2, None)),
        ({"completion_tokens": "2", "prompt_tokens_details": 5}, ServerUsage()),
    ],
)
def test_the_usage_of_all_apis_is_read(usage: dict[str, object], expected: ServerUsage) -> None:
    for body in ({"usage": usage}, {"response": {"usage": usage}}, {"message": {"usage": usage}}):
        assert usage_of_body(json.dumps(body, separators=(",", ":")).encode()) == expected


def test_later_reports_of_usage_complete_earlier_ones() -> None:
    """Anthropic's API has the prompt's tokens in its first event, and the answer's in a later."""
    begun = usage_of_body(b'{"message":{"usage":{"cache_read_input_tokens":8,"output_tokens":0}}}')
    assert begun.updated(usage_of_body(b'{"usage":{"output_tokens":5}}')) == ServerUsage(5, 8)
    assert begun.updated(ServerUsage()) == begun == ServerUsage(0, 8)


@pytest.mark.parametrize("body", [b'{"usage":{', b'["usage"]', b'{"usage":{}}', b"[" * 100_000])
def test_a_body_without_usage_has_none(body: bytes) -> None:
    assert usage_of_body(body) == ServerUsage()


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, MESSAGES, RESPONSES, "/v1/embeddings"])
def test_a_body_that_needs_no_change_stays_as_it_is(path: str) -> None:
    body = b'{ "model": "m", "stream": false }'
    assert forwarded(path, body, namespace="", reports_hits=False) == body


def test_the_tenants_salt_replaces_the_clients() -> None:
    body = b'{"cache_salt": "another tenant"}'
    for path in (CHAT, MESSAGES, RESPONSES):
        sent = forwarded(path, body, namespace="tenant", reports_hits=False)
        assert json.loads(sent)["cache_salt"] == "tenant"


@pytest.mark.parametrize("key", ["kv_cache_report_mode", r"kv\u005fcache_report_mode"])
@pytest.mark.parametrize("reports_hits", [True, False])
def test_whether_hits_are_reported_is_not_the_clients_choice(key: str, reports_hits: bool) -> None:
    expected = {"kv_cache_report_mode": "full"} if reports_hits else {}
    for path in (CHAT, COMPLETIONS):
        for chosen in ("full", "incremental", "none"):
            body = f'{{"vllm_xargs": {{"{key}": "{chosen}", "own": 1}}}}'.encode()
            sent = forwarded(path, body, namespace="", reports_hits=reports_hits)
            assert json.loads(sent)["vllm_xargs"] == {"own": 1} | expected
    sent = forwarded(CHAT, b"{}", namespace="", reports_hits=reports_hits)
    assert json.loads(sent).get("vllm_xargs", {}) == expected
    text = rb'{"prompt": "kv_cache_report_mode \u0041"}'
    assert forwarded(COMPLETIONS, text, namespace="", reports_hits=False) == text


@pytest.mark.parametrize("body", [b"[]", b'"text"', b'{"vllm_xargs": 5}'])
def test_a_strange_body_is_left_to_the_server(body: bytes) -> None:
    assert forwarded(CHAT, body, namespace="a", reports_hits=True)
