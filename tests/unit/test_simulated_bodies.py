"""The body of a request to a simulated engine gives sampling parameters, or is rejected.

The error names the field and a correct value.
"""

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.contract.http_call import NO_RECORD, HttpCall
from kvroute.replica.sim_engine.http_response import rendered
from kvroute.replica.sim_engine.sampling import (
    UNSUPPORTED,
    Chat,
    CommonBody,
    Completion,
    Sampling,
    UnsupportedRequestError,
    check,
    read,
)
from kvroute.router.api.errors import ApiError, event
from kvroute.router.api.parsing import json_object

CHATS = "/v1/chat/completions"


def sampling(
    kind: type[CommonBody], prompt_tokens: int = 10, limit: int = 110, **body: Any
) -> Sampling:
    raw = json.dumps(body).encode()
    return read(kind, raw, prompt_tokens=prompt_tokens, max_model_len=limit)


def chat(**body: Any) -> Sampling:
    return sampling(Chat, **body)


def completion(**body: Any) -> Sampling:
    return sampling(Completion, **body)


def refusal(kind: type[CommonBody] = Chat, **body: Any) -> dict[str, Any]:
    with pytest.raises(UnsupportedRequestError) as refused:
        sampling(kind, **body)
    return dict(json.loads(refused.value.body)["error"])


def test_defaults_are_openais() -> None:
    assert chat() == Sampling(max_tokens=100)
    assert completion() == Sampling(max_tokens=16)


def test_the_default_length_of_a_completion_fits_the_context() -> None:
    assert completion(prompt_tokens=105).max_tokens == 5


def test_a_null_means_the_default_and_an_unknown_field_is_ignored() -> None:
    unknown = {"user": "me", "metadata": {"a": 1}, "messages": 5}
    assert chat(temperature=None, n=None, stop=None, stream=None, **unknown) == chat()


def test_fields_reach_the_engine() -> None:
    fields = {"temperature": 0, "seed": 7, "min_tokens": 2, "n": 1, "max_tokens": 3}
    assert chat(**fields, stop=["a", "b"]) == Sampling(stop=("a", "b"), **fields)  # type: ignore[arg-type]
    assert chat(stop="END").stop == ("END",)


def test_max_completion_tokens_replaces_max_tokens() -> None:
    assert chat(max_tokens=3, max_completion_tokens=4).max_tokens == 4


def test_a_chat_reports_logprobs_on_request() -> None:
    assert chat().logprobs is None
    assert chat(logprobs=True).logprobs == 0
    assert chat(logprobs=True, top_logprobs=3).logprobs == 3
    assert completion(logprobs=2).logprobs == 2


def test_usage_ends_a_stream_on_request_only() -> None:
    assert chat(stream=True, stream_options={"include_usage": True}).include_usage
    assert not chat(stream=True, stream_options={"include_usage": None}).include_usage
    assert not chat(stream=True).include_usage


BAD_VALUES: dict[str, list[object]] = {
    "temperature": ["hot", "1", True, -0.1, 2.1, []],
    "top_p": [0, 1.1, "x", False],
    "max_tokens": [0, -1, 1.5, "5", True],
    "max_completion_tokens": [0],
    "n": [0, 129, 1.5, True],
    "top_k": [-2],
    "min_tokens": [-1],
    "seed": ["x", 1.5],
    "presence_penalty": [2.5],
    "frequency_penalty": ["a lot"],
    "stop": ["", [""], 5, [1], ["x"] * 65],
    "top_logprobs": [-1, 21, True],
    "logprobs": [1],
    "stream": ["yes"],
    "ignore_eos": [1],
    "stream_options": [5, {"include_usage": "yes"}],
}


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field, bad in BAD_VALUES.items() for value in bad]
)
def test_a_bad_value_is_refused_by_name(field: str, value: object) -> None:
    body: dict[str, Any] = {field: value}
    error = refusal(**body)
    assert error["type"] == "invalid_request_error"
    assert error["param"].startswith(field)
    assert error["message"].startswith(f"{field} is ")
    assert "; expected " in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": ["x" * 1000] * 5}, "stop"),
        ({"max_tokens": 101}, "messages"),
        ({"prompt_tokens": 110}, "messages"),
    ],
)
def test_fields_that_contradict_are_refused(fields: dict[str, Any], param: str) -> None:
    assert refusal(**fields)["param"] == param


def test_an_answer_may_fill_the_context_exactly() -> None:
    assert chat(max_tokens=100).max_tokens == 100
    assert chat(prompt_tokens=109).max_tokens == 1
    error = refusal(Completion, prompt_tokens=110)
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
    assert "110 tokens" in error["message"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("response_format", {"type": "json_object"}),
        ("tool_choice", "required"),
        ("logit_bias", {"5": 1}),
        ("modalities", ["text", "audio"]),
        ("audio", {"voice": "x"}),
        ("echo", True),
        ("suffix", "x"),
        ("best_of", 2),
    ],
)
def test_a_field_that_would_change_the_response_is_refused(field: str, value: object) -> None:
    body: dict[str, Any] = {field: value}
    error = refusal(Completion, **body)
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")


def test_an_unsupported_field_may_have_a_value_without_effect() -> None:
    nothing = {name: values[0] for name, values in UNSUPPORTED.items() if values}
    assert completion(**nothing, best_of=1, tools=[{"type": "function"}]) == completion()


def test_a_long_bad_value_is_quoted_in_part() -> None:
    assert len(refusal(temperature="x" * 10_000)["message"]) < 200


@pytest.mark.parametrize("path", [CHATS, "/v1/completions", "/v1/responses", "/tokenize"])
def test_a_body_that_no_router_renders_is_rejected_with_the_reason(path: str) -> None:
    call = HttpCall(path, b'{"messages": 5}', 1.0, problem="a message has an unknown role")
    refused = rendered(call).refusal
    assert refused
    message = json.loads(refused.data)["error"]["message"]
    if path in (CHATS, "/v1/completions"):
        assert (refused.status, "an unknown role" in message) == (400, True)
    else:
        assert (refused.status, "--engine vllm" in message) == (404, True)


def test_a_simulated_replica_asks_to_try_again_if_the_router_knows_no_template_yet() -> None:
    refused = rendered(HttpCall(CHATS, b'{"messages": []}', 1.0, problem=NO_RECORD)).refusal
    assert refused
    assert (refused.status, json.loads(refused.data)["error"]["code"]) == (503, "unavailable")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
field_names = st.sampled_from(
    sorted({*Chat.__struct_fields__, *Completion.__struct_fields__, *UNSUPPORTED})
)
bodies = st.dictionaries(field_names | st.text(max_size=3), json_values, max_size=5)


@pytest.mark.parametrize("kind", [Chat, Completion])
@given(body=bodies)
def test_any_object_is_read_or_refused(kind: type[CommonBody], body: dict[str, Any]) -> None:
    try:
        read(kind, json.dumps(body).encode(), prompt_tokens=10, max_model_len=110)
    except UnsupportedRequestError as error:
        json.loads(error.body)


@pytest.mark.parametrize("kind", [Chat, Completion])
@given(raw=st.binary() | st.text().map(str.encode))
def test_any_bytes_are_read_or_refused(kind: type[CommonBody], raw: bytes) -> None:
    with contextlib.suppress(UnsupportedRequestError):
        check(kind, raw)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"\xff", b"[" * 9999, b'{"messages": "\\ud800"}', b"[]", b"1", b"null"]
)
def test_a_router_refuses_a_body_that_is_no_json_object(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body is"):
        json_object(body)


def test_an_error_has_openais_shape() -> None:
    error = ApiError(404, "no such model", param="model", code="model_not_found")
    assert json.loads(error.body())["error"] == {
        "message": "no such model",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_found",
    }
    assert event(error, b"") == b"data: " + error.body() + b"\n\ndata: [DONE]\n\n"
    assert refusal(n=0).keys() == json.loads(error.body())["error"].keys()
