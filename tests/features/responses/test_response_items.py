"""A response object gets the previous response's id; its other bytes stay unchanged."""

import json
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.responses.response_items import (
    as_input,
    events_with,
    last_response,
    listed,
)
from kvroute.router.api.json_members import encode, members

PREVIOUS = {"previous_response_id": msgspec.Raw('"é"'.encode())}
# What may stand at any place of a response, such as in a tool's schema.
TRAP: dict[str, Any] = {
    "previous_response_id": None,
    "text": 'event: response.completed\ndata: {"a"',
}
RESPONSE: dict[str, Any] = {
    "id": "resp_1",
    "temperature": 1.0,
    "tools": [{"parameters": TRAP}],
    "output": [],
    "previous_response_id": None,
    "text": TRAP,
}


def written(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def event(kind: str, **body: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), written({"type": kind, **body}))


def test_only_the_response_object_of_an_event_gets_the_previous_id() -> None:
    delta = event("response.output_text.delta", delta='"previous_response_id":null', item=TRAP)
    created = event("response.created", response=RESPONSE, sequence_number=0)
    named = event(
        "response.created", response={**RESPONSE, "previous_response_id": "é"}, sequence_number=0
    )
    assert events_with(PREVIOUS, created + delta + created) == named + delta + named


def test_data_without_a_response_object_stays_unchanged() -> None:
    data = b'data: {"error":{"previous_response_id":null}}\n\n'
    assert events_with(PREVIOUS, data) == data


@given(
    st.recursive(
        st.none()
        | st.integers(-(2**70), 2**70)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=9,
    )
)
def test_a_response_keeps_every_other_byte(value: object) -> None:
    raw = written({"a": value, "previous_response_id": None, "b": value})
    found = members(raw) | {"previous_response_id": msgspec.Raw(b'"resp_0"')}
    assert encode(found) == written({"a": value, "previous_response_id": "resp_0", "b": value})


def test_the_last_event_has_the_response_to_store() -> None:
    first = event("response.created", response=RESPONSE)
    assert last_response(first) is None
    for kind in ("response.completed", "response.incomplete"):
        found = last_response(first + event(kind, response=RESPONSE) + b'data: {"receipts":1}\n\n')
        assert found is not None
        assert bytes(found["id"]) == b'"resp_1"'


def test_output_items_become_input_items_that_vllm_can_read() -> None:
    text = {"type": "output_text", "text": "Hi", "annotations": [], "logprobs": [{"token": "a"}]}
    reasoning = {"type": "reasoning", "content": [], "summary": [{"text": "so"}]}
    call = {"type": "function_call", "arguments": "{}"}
    message = {"type": "message", "role": "assistant", "content": [text]}
    bare = {**text}
    del bare["logprobs"]
    assert as_input([reasoning, {**message, "content": []}, message, call]) == [
        reasoning,
        {**message, "content": [bare]},
        call,
    ]


def test_listed_items_have_ids_types_and_parts() -> None:
    own = {"type": "function_call_output", "id": "fc_1", "output": "5"}
    said = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}, own]
    user, assistant, other = listed(said, "resp_1")
    assert user["content"] == [{"type": "input_text", "text": "Hi"}]
    assert assistant["content"] == [{"type": "output_text", "text": "Ho", "annotations": []}]
    assert other == own
    assert len({user["id"], assistant["id"]}) == 2
    assert user["type"] == "message"
