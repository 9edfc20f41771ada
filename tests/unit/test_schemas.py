"""A request either parses or is refused with the field and what to write there."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.generation import Sampling
from kvroute.router.api.errors import ApiError
from kvroute.router.api.parsing import UNSUPPORTED, parse
from kvroute.router.api.schemas import ChatCompletionRequest, CompletionRequest

HI = [{"role": "user", "content": "hi"}]


def chat(**fields: object) -> ChatCompletionRequest:
    return parse(ChatCompletionRequest, json.dumps({"messages": HI, **fields}).encode())


def completion(**fields: object) -> CompletionRequest:
    return parse(CompletionRequest, json.dumps({"prompt": "hi", **fields}).encode())


def test_defaults_are_openais() -> None:
    assert chat().sampling(100) == Sampling(max_tokens=100)
    assert completion().sampling(100) == Sampling(max_tokens=16)


def test_a_completion_asks_for_no_more_than_the_room_by_default() -> None:
    assert completion().sampling(5).max_tokens == 5


def test_a_null_means_the_default_and_an_unknown_field_is_ignored() -> None:
    request = chat(temperature=None, n=None, stop=None, stream=None, user="me", metadata={"a": 1})
    assert request.sampling(9) == Sampling(max_tokens=9)


def test_sampling_fields_reach_the_engine() -> None:
    fields = {"temperature": 0, "top_p": 0.5, "top_k": 4, "seed": 7, "min_tokens": 2, "n": 1}
    fields |= {"presence_penalty": 1, "frequency_penalty": -1.5, "ignore_eos": True}
    expected = Sampling(max_tokens=3, stop=("a", "b"), **fields)  # type: ignore[arg-type]
    assert chat(**fields, max_tokens=3, stop=["a", "b"]).sampling(9) == expected


def test_one_stop_string_needs_no_list() -> None:
    assert chat(stop="END").sampling(9).stop == ("END",)


def test_top_k_minus_one_means_every_token() -> None:
    assert chat(top_k=-1).sampling(9).top_k == 0


def test_the_newer_name_of_the_limit_wins() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).sampling(9).max_tokens == 4


@pytest.mark.parametrize(
    ("fields", "alternatives"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 3}, 3)],
)
def test_chat_reports_logprobs_on_request(
    fields: dict[str, object], alternatives: int | None
) -> None:
    assert chat(**fields).sampling(9).logprobs == alternatives


def test_usage_ends_a_stream_on_request_only() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert not chat(stream=True).include_usage


def test_text_parts_are_joined_and_an_assistant_may_have_said_nothing() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": None}]
    assert [message.content for message in chat(messages=turns).messages] == ["a\nb", ""]


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2]], [[1], [2]])],
)
def test_a_prompt_is_text_or_token_ids_one_or_several(prompt: object, prompts: object) -> None:
    found = completion(prompt=prompt).prompts()
    assert [each if isinstance(each, str) else each.tolist() for each in found] == prompts


BAD_VALUES: dict[str, list[object]] = {
    "temperature": ["hot", "1", True, -0.1, 2.1, [], 10**400],
    "top_p": [0, 1.1, "x", False],
    "max_tokens": [0, -1, 1.5, "5", True],
    "max_completion_tokens": [0],
    "n": [0, 129, 1.5, True],
    "top_k": [-2],
    "min_tokens": [-1],
    "seed": [2**63],
    "presence_penalty": [2.5],
    "frequency_penalty": ["a lot"],
    "stop": ["", [""], 5, [1], ["x"] * 65, "x" * 5000, ["x" * 1000] * 5],
    "top_logprobs": [-1, 21, True],
    "logprobs": [1],
    "stream": ["yes"],
    "ignore_eos": [1],
    "cache_salt": [5, "x" * 257],
    "model": [5, "x" * 257],
    "messages": [[], "hi", [{"role": "user", "content": ""}] * 8193],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, bad in BAD_VALUES.items() for value in bad]
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(**{field: value})
    error = refusal.value
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", field)
    assert error.message.startswith(f"{field} is ")
    assert "; expected " in error.message


@pytest.mark.parametrize(
    ("message", "param", "says"),
    [
        ({"role": "robot", "content": "hi"}, "messages.0.role", "'system', 'developer', 'user'"),
        ({"role": "tool", "content": "hi"}, "messages.0.role", "'user' or 'assistant'"),
        ({"role": "user"}, "messages.0.content", "is missing"),
        ({"role": "user", "content": None}, "messages.0.content", "expected a string"),
        ({"role": "user", "content": []}, "messages.0.content", "expected a string"),
        ({"role": "user", "content": [1]}, "messages.0.content", "part 0"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.0.content", "needs a string"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages.0.content", "text only"),
        (
            {"role": "assistant", "content": "", "tool_calls": [{}]},
            "messages.0.tool_calls",
            "not supported",
        ),
        ("hi", "messages.0", "expected an object"),
    ],
)
def test_a_bad_message_is_refused_by_its_place(message: object, param: str, says: str) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(messages=[message])
    assert refusal.value.param == param
    assert says in refusal.value.message


@pytest.mark.parametrize(
    "prompt", [[], [[]], [["a"]], ["a", 1], [1, "a"], [1.0], [True], [-1], [2**32], 5, {}]
)
def test_a_bad_prompt_is_refused(prompt: object) -> None:
    with pytest.raises(ApiError, match=r"prompt is .*; expected a string, a list of strings"):
        completion(prompt=prompt)


def test_a_missing_prompt_is_refused() -> None:
    with pytest.raises(ApiError, match="messages is missing; expected a list"):
        parse(ChatCompletionRequest, b"{}")
    with pytest.raises(ApiError, match="prompt is missing"):
        parse(CompletionRequest, b'{"prompt": null}')


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"stream_options": {"include_usage": "yes"}}, "stream_options.include_usage"),
    ],
)
def test_fields_that_contradict_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(ApiError) as refusal:
        chat(**fields)
    assert refusal.value.param == param


def test_more_tokens_at_least_than_at_most_are_refused() -> None:
    with pytest.raises(ApiError, match="min_tokens is 5, above the limit of 4"):
        chat(min_tokens=5, max_tokens=4).sampling(100)


def test_the_choices_of_one_request_are_bounded() -> None:
    with pytest.raises(ApiError, match="make 1280 choices"):
        completion(prompt=["a"] * 10, n=128)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("logit_bias", {"5": 1}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
    ],
)
def test_a_field_we_cannot_honour_is_refused(field: str, value: object) -> None:
    with pytest.raises(ApiError) as refusal:
        completion(**{field: value})
    assert (refusal.value.param, refusal.value.code) == (field, "unsupported_parameter")


def test_a_field_we_cannot_honour_may_ask_for_nothing() -> None:
    nothing = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert completion(**nothing, best_of=1).sampling(9) == completion().sampling(9)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 9999, b'{"messages": "\\ud800"}', b"[]", b"1", b"null"]
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is"):
        parse(ChatCompletionRequest, body)


@pytest.mark.parametrize("number", [b"NaN", b"Infinity", b"1e999"])
def test_a_number_that_is_none_is_refused(number: bytes) -> None:
    with pytest.raises(ApiError):
        parse(CompletionRequest, b'{"prompt": "hi", "temperature": ' + number + b"}")


def test_a_long_bad_value_is_quoted_in_part() -> None:
    with pytest.raises(ApiError) as refusal:
        chat(temperature="x" * 10_000)
    assert len(refusal.value.message) < 200


def test_an_answer_may_fill_the_context_exactly() -> None:
    assert chat(max_tokens=90).room(10, 100) == 90
    assert chat().room(99, 100) == 1


def test_what_does_not_fit_the_context_is_refused_with_the_numbers() -> None:
    with pytest.raises(
        ApiError, match=r"100 tokens.*requested 101 tokens \(10 in the messages, 91"
    ):
        chat(max_tokens=91).room(10, 100)
    with pytest.raises(ApiError, match="resulted in 100 tokens") as refusal:
        completion().room(100, 100)
    assert (refusal.value.param, refusal.value.code) == ("prompt", "context_length_exceeded")


def test_an_error_has_openais_shape() -> None:
    error = ApiError(404, "no such model", param="model", code="model_not_found")
    assert json.loads(error.body())["error"] == {
        "message": "no such model",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert error.event() == b"data: " + error.body() + b"\n\n"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    sorted({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields, *UNSUPPORTED})
)
messages = st.lists(
    st.dictionaries(st.sampled_from(["role", "content", "tool_calls"]), json_values, max_size=3)
)
bodies = st.dictionaries(field_names | st.text(max_size=3), json_values | messages, max_size=5)


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@given(body=bodies)
def test_any_object_parses_or_is_refused(
    model: type[ChatCompletionRequest | CompletionRequest], body: dict[str, object]
) -> None:
    try:
        request = parse(model, json.dumps({"prompt": "hi", "messages": HI, **body}).encode())
        request.sampling(100)
    except ApiError as error:
        json.loads(error.body())


@pytest.mark.parametrize("model", [ChatCompletionRequest, CompletionRequest])
@given(raw=st.binary() | st.text().map(str.encode))
def test_any_bytes_parse_or_are_refused(
    model: type[ChatCompletionRequest | CompletionRequest], raw: bytes
) -> None:
    with pytest.raises(ApiError):
        parse(model, raw)
