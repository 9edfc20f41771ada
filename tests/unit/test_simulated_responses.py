"""A simulated engine's responses have the format that OpenAI's client expects, in each event.

tests/unit/test_dispatch.py tests them with interruptions.
"""

import json
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from kvroute.replica.sim_engine.choice_output import Alternative, ChoiceOutput, TokenLogprob
from kvroute.replica.sim_engine.sampling import Sampling
from kvroute.replica.sim_engine.shapes import DONE, ChatReply, CompletionReply, SimulatedResponse

USAGE = {
    "prompt_tokens": 40,
    "completion_tokens": 4,
    "total_tokens": 44,
    "prompt_tokens_details": {"cached_tokens": 32},
}


def output(text: str, *, index: int = 0, end: str | None = None) -> ChoiceOutput:
    return ChoiceOutput(index, text, (1, 2), 32, finish_reason=end)


def reply(kind: type[SimulatedResponse], **sampling: Any) -> SimulatedResponse:
    asked = Sampling(**{"max_tokens": 9, "is_stream": True} | sampling)
    return kind(asked, id_="1", model='a "model"', created=1.5, prompt_tokens=40)


def whole(kind: type[SimulatedResponse], *outputs: ChoiceOutput, **sampling: Any) -> Any:
    response = reply(kind, is_stream=False, **sampling)
    assert b"".join(map(response.add, outputs)) == b""
    return json.loads(response.end())


def events(kind: type[SimulatedResponse], *outputs: ChoiceOutput, **sampling: Any) -> list[Any]:
    """Return the decoded events of a stream, without its end."""
    response = reply(kind, **sampling)
    stream = b"".join(map(response.add, outputs)) + response.end()
    assert stream.endswith(DONE)
    lines = stream.removesuffix(DONE).decode().split("\n\n")[:-1]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def token(text: str, logprob: float, **top: float) -> TokenLogprob:
    others = tuple(Alternative(other, value) for other, value in top.items())
    return TokenLogprob(Alternative(text, logprob), others)


def test_a_chat_is_what_the_client_expects() -> None:
    answer = whole(ChatReply, output("Hel"), output('lo "you"\n', end="stop"))
    parsed = ChatCompletion.model_validate(answer, strict=True)
    assert (parsed.id, parsed.model, parsed.created) == ("chatcmpl-1", 'a "model"', 1)
    assert parsed.choices[0].message.role == "assistant"
    assert parsed.choices[0].message.content == 'Hello "you"\n'
    assert parsed.choices[0].finish_reason == "stop"
    assert answer["usage"] == USAGE


def test_a_completion_is_what_the_client_expects() -> None:
    answer = whole(CompletionReply, output("a"), output("b", end="length"))
    parsed = Completion.model_validate(answer, strict=True)
    assert parsed.id == "cmpl-1"
    assert [(choice.text, choice.finish_reason) for choice in parsed.choices] == [("ab", "length")]
    assert answer["usage"] == USAGE


def test_a_chat_stream_opens_each_choice_with_a_role() -> None:
    stream = events(ChatReply, output("a", index=1, end="stop"), n=2)
    parsed = [ChatCompletionChunk.model_validate(event, strict=True) for event in stream]
    assert len({event.id for event in parsed}) == 1
    deltas = [(event.choices[0].index, event.choices[0].delta.role) for event in parsed]
    assert deltas == [(0, "assistant"), (1, "assistant"), (1, None)]
    assert parsed[-1].choices[0].delta.content == "a"
    assert [event.choices[0].finish_reason for event in parsed] == [None, None, "stop"]


def test_a_completion_stream_is_what_the_client_expects() -> None:
    stream = events(CompletionReply, output("é🙂"), output("", end="length"))
    choice = {"index": 0, "text": "é🙂", "logprobs": None, "finish_reason": None}
    assert stream[0]["choices"][0] == choice
    assert Completion.model_validate(stream[-1], strict=True).choices[0].finish_reason == "length"


@pytest.mark.parametrize("kind", [ChatReply, CompletionReply])
def test_usage_ends_a_stream_on_request_and_is_null_before(kind: type[SimulatedResponse]) -> None:
    *before, last = events(kind, output("a"), output("b", end="stop"), include_usage=True)
    assert all(event["usage"] is None for event in before)
    assert last["choices"] == []
    assert last["usage"] == USAGE
    assert all("usage" not in event for event in events(kind, output("a")))


def test_a_response_is_complete_at_the_end_of_its_last_choice() -> None:
    response = reply(CompletionReply, n=2)
    response.add(output("a", index=1, end="stop"))
    assert not response.is_complete
    response.add(output("a", end="length"))
    assert response.is_complete


def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    outputs = ChoiceOutput(0, "é", (1,), 0, (token("é", -0.5, a=-0.5, b=-9.0),), "stop")
    answer = whole(ChatReply, outputs, logprobs=2)
    logprobs = ChatCompletion.model_validate(answer, strict=True).choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert logprobs.content[0].bytes == [0xC3, 0xA9]
    alternatives = [(top.token, top.logprob) for top in logprobs.content[0].top_logprobs]
    assert alternatives == [("a", -0.5), ("b", -9.0)]
    (_, streamed) = events(ChatReply, outputs, logprobs=2)
    assert ChatCompletionChunk.model_validate(streamed, strict=True).choices[0].logprobs


def test_completion_logprobs_are_parallel_lists_with_the_chosen_token_among_the_alternatives() -> (
    None
):
    tokens = (token("ab", -2.0, x=-0.1), token("c", -0.3, c=-0.3))
    answer = whole(CompletionReply, ChoiceOutput(0, "abc", (1, 2), 0, tokens), logprobs=1)
    assert answer["choices"][0]["logprobs"] == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-2.0, -0.3],
        "top_logprobs": [{"x": -0.1, "ab": -2.0}, {"c": -0.3}],
        "text_offset": [0, 2],
    }


def test_streamed_offsets_continue_where_the_last_event_ended() -> None:
    outputs = [
        ChoiceOutput(0, "ab", (1,), 0, (token("ab", -1.0),)),
        ChoiceOutput(0, "c", (1,), 0, (token("c", -1),)),
    ]
    stream = events(CompletionReply, *outputs, logprobs=0)
    offsets = [event["choices"][0]["logprobs"]["text_offset"] for event in stream]
    assert offsets == [[0], [2]]


def test_the_bytes_of_a_stream_are_pinned() -> None:
    response = reply(ChatReply)
    response.add(output("x"))
    assert response.add(output("hi\n", end="stop")) == (
        b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,'
        b'"model":"a \\"model\\"","choices":[{"index":0,"delta":{"content":"hi\\n"},'
        b'"logprobs":null,"finish_reason":"stop"}]}\n\n'
    )
    assert response.end() == b"data: [DONE]\n\n"
