"""The fields that a router reads from a call, and the bodies that it rejects to protect others."""

import inspect
import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.blocks.chain import EVERYBODY
from kvroute.features.gate import ANYONE, Caller
from kvroute.router.api.call_limits import (
    MAX_CHOICES,
    MAX_COPIED,
    MAX_GRAMMAR_BYTES,
    MAX_GRAMMAR_VALUES,
    MAX_N,
    MAX_TEXT,
    MAX_VALUES,
    TOKENIZER_ARGUMENTS,
)
from kvroute.router.api.calls import (
    CHAT_COMPLETIONS,
    COMPLETIONS,
    MESSAGES,
    RESPONSES,
    Call,
    parse_any,
    parse_call,
)
from kvroute.router.api.chat_message import MAX_MESSAGES
from kvroute.router.api.errors import ApiError
from kvroute.router.placement.fleet import Fleet
from kvroute.router.serving.rendering import RenderedCall

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)
FIELDS = (
    *("model", "messages", "prompt", "n", "stream", "cache_salt", "prefix_id", "task_id", "tools"),
)


def called(path: str = COMPLETIONS, **body: Any) -> Call:
    return parse_call(path, json.dumps(body).encode())


def refusal(path: str = COMPLETIONS, **body: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        called(path, **body)
    return refused.value


@given(
    st.dictionaries(st.sampled_from(FIELDS), JSON), st.sampled_from([CHAT_COMPLETIONS, COMPLETIONS])
)
def test_any_body_is_parsed_or_refused(body: dict[str, Any], path: str) -> None:
    try:
        call = called(path, **body)
    except ApiError as error:
        status = error.status
    else:
        status = 200
    assert status < 500
    if status != 200:
        return
    prompts = call.prompts()
    assert prompts is None or all(isinstance(prompt, str | np.ndarray) for prompt in prompts)
    assert isinstance(call.cache_salt, str)
    assert 1 <= call.n <= MAX_N


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), min_size=1), min_size=1, max_size=5))
def test_token_ids_are_arrays(prompts: list[list[int]]) -> None:
    found = called(prompt=prompts).prompts()
    assert found is not None
    assert [list(map(int, each)) for each in found] == prompts
    alone = called(prompt=prompts[0]).prompts() or []
    assert [list(map(int, each)) for each in alone] == prompts[:1]


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_each_prompt_gets_its_own_body(prompt: list[Any]) -> None:
    call = called(prompt=prompt, max_tokens=3)
    bodies = [json.loads(body) for body in call.with_each_prompt()]
    assert bodies == [{"prompt": each, "max_tokens": 3} for each in prompt]


@pytest.mark.parametrize("prompt", [5, {"a": 1}, ["a", [1]], [[]], [-1], [2**32], [True], [1.5]])
def test_an_invalid_prompt_is_left_to_the_replica(prompt: Any) -> None:
    assert called(prompt=prompt).prompts() is None


def test_a_text_to_embed_may_have_many_token_ids() -> None:
    ids = [1] * 5000
    assert called("/v1/embeddings", input=ids).body["input"] == ids
    assert refusal("/v1/embeddings", input=["a"] * 5000).param == "input"


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("n", {"n": MAX_N + 1}),
        ("prompt", {"prompt": ["a"] * (MAX_CHOICES + 1)}),
        ("prompt", {"prompt": ["a"] * 100, "n": 100}),
        ("cache_salt", {"cache_salt": "x" * 257}),
        ("cache_salt", {"cache_salt": 5}),
        ("messages", {"messages": [0] * (MAX_MESSAGES + 1)}),
        ("input", {"input": [0] * 4097}),
        ("tools", {"tools": [0] * 1025}),
        ("documents", {"documents": ["a"] * 4097}),
        ("text_2", {"text_2": ["a"] * 4097}),
        ("metadata", {"metadata": dict.fromkeys(map(str, range(4097)), 1)}),
        ("logit_bias", {"logit_bias": dict.fromkeys(map(str, range(1025)), "x")}),
        ("allowed_token_ids", {"allowed_token_ids": [0] * 1025}),
        ("stop_token_ids", {"stop_token_ids": [0] * 129}),
        ("stop", {"stop": ["a"] * 257}),
        ("stop", {"stop": "a" * (MAX_TEXT + 1)}),
        ("stop_sequences", {"stop_sequences": ["a" * MAX_TEXT, "b"]}),
        ("bad_words", {"bad_words": ["a"] * 129}),
        ("bad_words", {"bad_words": ["a" * (MAX_TEXT + 1)]}),
        ("tools", {"tools": [{"a": [0] * MAX_GRAMMAR_VALUES}]}),
        ("response_format", {"response_format": {"enum": [0] * MAX_GRAMMAR_VALUES}}),
        ("text", {"text": {"format": {"enum": [0] * MAX_GRAMMAR_VALUES}}}),
        ("structured_outputs", {"structured_outputs": {"regex": "a" * MAX_GRAMMAR_BYTES}}),
        ("kv_transfer_params", {"kv_transfer_params": {"prompt_token_ids": [1]}}),
        (
            "chat_template_kwargs",
            {"chat_template_kwargs": {"padding": "max_length", "max_length": 10**9}},
        ),
    ],
)
def test_a_body_that_could_harm_a_replica_is_refused(param: str, body: dict[str, Any]) -> None:
    assert (refusal(**body).status, refusal(**body).param) == (400, param)


def test_every_tokenizer_argument_that_is_not_a_template_variable_is_refused() -> None:
    from transformers import PythonBackend

    ours = {"add_generation_prompt", "continue_final_message", "documents", "tools"}
    refused_elsewhere, no_names = {"chat_template"}, {"self", "kwargs"}
    known = {*TOKENIZER_ARGUMENTS, *ours, *refused_elsewhere, *no_names}
    assert {*inspect.signature(PythonBackend.apply_chat_template).parameters} == known


def test_1024_tokens_can_have_a_bias() -> None:
    bias = dict.fromkeys(map(str, range(1024)), 1.0)
    assert called(logit_bias=bias).body["logit_bias"] == bias


def test_a_body_with_too_many_values_is_refused_and_token_ids_do_not_count() -> None:
    many = [0] * (MAX_VALUES + 1)
    assert refusal(CHAT_COMPLETIONS, metadata=many).status == 413
    assert refusal(CHAT_COMPLETIONS, tools=[{"a": [many]}]).status == 413
    assert len((called(prompt=many).prompts() or [[]])[0]) == len(many)


def test_many_prompts_with_large_other_fields_are_refused() -> None:
    suffix, most = "x" * 40_000, MAX_COPIED // 40_100
    assert len(called(prompt=["a"] * most, suffix=suffix).prompts() or ()) == most
    assert called(prompt=["a" * 4000] * 1000).prompts()
    refused = refusal(prompt=["a"] * (most + 3), suffix=suffix)
    assert (refused.status, refused.code) == (413, "request_too_large")


def seen(**part: Any) -> dict[str, Any]:
    """Return a body with an image."""
    content = [{"type": "text", "text": "What is it?"}, part]
    return {"messages": [{"role": "user", "content": content}]}


@pytest.mark.parametrize("value", [None, {"url": None}])
@pytest.mark.parametrize("field", ["image_url", "video_url", "input_audio"])
def test_a_uuid_without_its_image_is_refused(field: str, value: object) -> None:
    """Other replicas do not have the image."""
    error = refusal(CHAT_COMPLETIONS, **seen(uuid="logo", **{field: value}))
    assert (error.status, error.param) == (400, field)
    assert not isinstance(
        called(CHAT_COMPLETIONS, **seen(uuid="logo", **{field: "data:,"})), ApiError
    )


@pytest.mark.parametrize("uuid", ["x" * 257, 7, ["x"]])
def test_an_images_uuid_is_a_short_string(uuid: object) -> None:
    """The uuid is hashed with each of the image's blocks."""
    assert refusal(CHAT_COMPLETIONS, **seen(uuid=uuid, image_url="data:,")).param == "uuid"


@pytest.mark.parametrize("spelt", ["uuid", r"\u0075uid"])
def test_uuids_of_images_are_refused_from_tenants(spelt: str) -> None:
    raw = json.dumps(seen(uuid="logo", image_url="data:,")).replace("uuid", spelt).encode()
    call = parse_call(CHAT_COMPLETIONS, raw)
    assert call.with_caller(ANYONE).caller == ANYONE
    caller = Caller("acme", frozenset(), "salt")
    with pytest.raises(ApiError) as refused:
        call.with_caller(caller)
    assert (refused.value.status, refused.value.param) == (400, "uuid")
    without = called(CHAT_COMPLETIONS, **seen(image_url="data:,"))
    assert without.with_caller(caller).cache_salt == "salt"
    tool = {"type": "tool_use", "input": {"uuid": "7", "image_url": "x"}}
    assert called(CHAT_COMPLETIONS, **seen(**tool)).with_caller(caller).caller is caller


@pytest.mark.parametrize(
    ("body", "path"),
    [
        ({"messages": []}, CHAT_COMPLETIONS),
        ({"messages": [{"content": "hi"}, {"content": [{"type": "text"}]}, 1]}, CHAT_COMPLETIONS),
        ({"messages": [], "tools": [{"type": "function", "function": {}}]}, CHAT_COMPLETIONS),
        ({"messages": [], "system": "Be brief."}, MESSAGES),
        ({"messages": [], "tools": [{"name": "a", "input_schema": {}}]}, MESSAGES),
        ({"messages": [{"content": [{"type": "tool_result"}]}]}, MESSAGES),
        ({"input": "hi"}, RESPONSES),
        ({"prompt": "hi"}, COMPLETIONS),
    ],
)
def test_the_route_of_a_body_is_found_by_its_fields(body: dict[str, Any], path: str) -> None:
    assert parse_any(json.dumps(body).encode()).path == path


@pytest.mark.parametrize(
    ("path", "body", "reads_cache"),
    [
        (CHAT_COMPLETIONS, {}, True),
        (CHAT_COMPLETIONS, {"prompt_logprobs": 0}, False),
        (CHAT_COMPLETIONS, {"echo": True, "top_logprobs": 2}, False),
        (COMPLETIONS, {"logprobs": 2}, True),
        (COMPLETIONS, {"echo": True}, True),
        (COMPLETIONS, {"echo": True, "logprobs": 0}, False),
        (MESSAGES, {"echo": True}, True),
    ],
)
def test_a_request_that_cannot_use_the_cache_is_placed_without_cache_hits(
    path: str, body: dict[str, Any], reads_cache: bool
) -> None:
    """Two such requests do not expect each other's blocks either."""
    rendered = RenderedCall(called(path, **body), [np.arange(64, dtype=np.uint32)])
    assert rendered.call.reads_cache == reads_cache
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    plain, *chains = [
        tuple(fleet.caches.chain(rendered.token_ids[0], EVERYBODY, media))
        for media in ((), rendered.placed_media(), rendered.placed_media())
    ]
    assert len({chain[0] for chain in (plain, *chains)}) == (1 if reads_cache else 3)


@pytest.mark.parametrize("messages", [3, "Hello", {"role": "user"}])
def test_messages_that_are_no_list_are_named_with_what_is_expected(messages: Any) -> None:
    with pytest.raises(ApiError, match="expected a list of messages") as refused:
        parse_call(CHAT_COMPLETIONS, json.dumps({"messages": messages}).encode())
    assert (refused.value.status, refused.value.param) == (400, "messages")
