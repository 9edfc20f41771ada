"""Answers are what the official client expects of OpenAI, event for event."""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvroute.contract.generation import Alternative, Chunk, TokenLogprob
from kvroute.router.api.responses import DONE, ChatReply, CompletionReply, Reply


def chunk(text: str, *, index: int = 0, end: str | None = None, cached: int = 32) -> Chunk:
    return Chunk(index, text, (1, 2), cached, finish_reason=end)


def whole(reply: Reply, *said: Chunk) -> Any:
    for part in said:
        reply.add(part)
    return json.loads(reply.whole())


def events(reply: Reply, *said: Chunk) -> list[Any]:
    """The decoded events of a stream, its end left out."""
    stream = reply.opening() + b"".join(map(reply.event, said)) + reply.closing()
    assert stream.endswith(DONE)
    lines = stream.removesuffix(DONE).decode().split("\n\n")[:-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def token(text: str, logprob: float, **top: float) -> TokenLogprob:
    others = tuple(Alternative(other, 0, value) for other, value in top.items())
    return TokenLogprob(Alternative(text, 0, logprob), others)


def test_a_chat_answer_is_what_the_client_expects() -> None:
    answer = whole(ChatReply("m", 40), chunk("Hel"), chunk('lo "you"\n', end="stop"))
    parsed = ChatCompletion.model_validate(answer, strict=True)
    assert parsed.id.startswith("chatcmpl-")
    assert parsed.model == "m"
    assert parsed.choices[0].message.role == "assistant"
    assert parsed.choices[0].message.content == 'Hello "you"\n'
    assert parsed.choices[0].finish_reason == "stop"


def test_a_completion_is_what_the_client_expects() -> None:
    answer = whole(CompletionReply("m", 40), chunk("a"), chunk("b", end="length"))
    parsed = Completion.model_validate(answer, strict=True)
    assert parsed.id.startswith("cmpl-")
    assert [(choice.text, choice.finish_reason) for choice in parsed.choices] == [("ab", "length")]


@pytest.mark.parametrize("reply", [ChatReply("m", 40), CompletionReply("m", 40)])
def test_usage_says_what_came_from_the_cache(reply: Reply) -> None:
    assert whole(reply, chunk("a"), chunk("b", end="stop"))["usage"] == {
        "prompt_tokens": 40,
        "completion_tokens": 4,
        "total_tokens": 44,
        "prompt_tokens_details": {"cached_tokens": 32},
    }


def test_usage_sums_over_prompts_and_counts_a_prompt_once_for_its_choices() -> None:
    reply = CompletionReply("m", 80, prompts=2, n=2)
    for prompt, cached in ((0, 32), (1, 64)):
        for index in (0, 1):
            reply.add(chunk(f"{prompt}{index}", index=index, cached=cached, end="stop"), prompt)
    answer = json.loads(reply.whole())
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 96
    assert answer["usage"]["completion_tokens"] == 8
    assert [choice["text"] for choice in answer["choices"]] == ["00", "01", "10", "11"]
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]


def test_a_chat_stream_opens_each_choice_with_a_role() -> None:
    stream = events(ChatReply("m", 4, n=2), chunk("a", index=1, end="stop"))
    parsed = [ChatCompletionChunk.model_validate(event, strict=True) for event in stream]
    assert len({event.id for event in parsed}) == 1
    deltas = [(event.choices[0].index, event.choices[0].delta.role) for event in parsed]
    assert deltas == [(0, "assistant"), (1, "assistant"), (1, None)]
    assert parsed[-1].choices[0].delta.content == "a"
    assert [event.choices[0].finish_reason for event in parsed] == [None, None, "stop"]


def test_a_completion_stream_is_what_the_client_expects() -> None:
    stream = events(CompletionReply("m", 4), chunk("é🙂"), chunk("", end="length"))
    last = Completion.model_validate(stream[-1], strict=True)
    assert stream[0]["choices"][0] == {
        "index": 0,
        "text": "é🙂",
        "logprobs": None,
        "finish_reason": None,
    }
    assert last.choices[0].finish_reason == "length"


@pytest.mark.parametrize("reply_class", [ChatReply, CompletionReply])
def test_usage_ends_a_stream_on_request_and_is_null_before(reply_class: type[Reply]) -> None:
    *before, last = events(reply_class("m", 40, include_usage=True), chunk("a", end="stop"))
    assert all(event["usage"] is None for event in before)
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] == 42
    assert all("usage" not in event for event in events(reply_class("m", 40), chunk("a")))


@pytest.mark.parametrize("reply_class", [ChatReply, CompletionReply])
def test_the_choices_of_a_second_prompt_follow_the_first(reply_class: type[Reply]) -> None:
    reply = reply_class("m", 4, prompts=2, n=3)
    event = reply.event(chunk("a", index=2), 1)
    assert json.loads(event.removeprefix(b"data: "))["choices"][0]["index"] == 5


def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    tokens = (token("é", -0.5, a=-0.5, b=float("-inf")),)
    answer = whole(ChatReply("m", 4, logprobs=True), Chunk(0, "é", (1,), 0, tokens, "stop"))
    logprobs = ChatCompletion.model_validate(answer, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [0xC3, 0xA9]
    alternatives = [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs]
    assert alternatives == [("a", -0.5), ("b", -9999.0)]


def test_completion_logprobs_are_parallel_lists_with_the_chosen_token_among_the_alternatives() -> (
    None
):
    tokens = (token("ab", -2.0, x=-0.1), token("c", -0.3, c=-0.3))
    answer = whole(CompletionReply("m", 4, logprobs=True), Chunk(0, "abc", (1, 2), 0, tokens))
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-2.0, -0.3],
        "top_logprobs": [{"x": -0.1, "ab": -2.0}, {"c": -0.3}],
        "text_offset": [0, 2],
    }


def test_streamed_offsets_go_on_where_the_last_event_ended() -> None:
    reply = CompletionReply("m", 4, logprobs=True)
    said = [
        Chunk(0, "ab", (1,), 0, (token("ab", -1.0),)),
        Chunk(0, "c", (1,), 0, (token("c", -1),)),
    ]
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in events(reply, *said)]
    assert offsets == [[0], [2]]


def test_streamed_chat_logprobs_are_what_the_client_expects() -> None:
    said = Chunk(0, "a", (1,), 0, (token("a", -1.0, a=-1.0),))
    *_, event = events(ChatReply("m", 4, logprobs=True), said)
    logprobs = ChatCompletionChunk.model_validate(event, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].token == "a"


def test_the_bytes_of_a_stream_are_pinned() -> None:
    reply = ChatReply('a "model"', 4)
    head = json.dumps(reply.id)
    event = reply.event(chunk("hi\n", end="stop")).decode()
    before, after = event.split(f'"id":{head}')
    assert before == "data: {"
    assert after.startswith(',"object":"chat.completion.chunk","created":')
    assert after.endswith(
        ',"model":"a \\"model\\"","choices":[{"index":0,"delta":{"content":"hi\\n"},'
        '"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    assert reply.closing() == b"data: [DONE]\n\n"
