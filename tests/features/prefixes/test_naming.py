"""A request names a prefix in its body or in a header."""

import json
from typing import Any

import pytest

from kvroute.features.prefixes.router_prefixes import HEADER, named_in
from kvroute.router.api.calls import CHAT_COMPLETIONS, Call, parse_call
from kvroute.router.api.errors import ApiError


def called(**body: Any) -> Call:
    return parse_call(CHAT_COMPLETIONS, json.dumps(body).encode())


def test_a_request_can_name_only_one_prefix() -> None:
    assert named_in(called(prefix_id=5)) == ("prefix_id", "5")
    assert named_in(called(task_id="law")) == ("task_id", "law")
    assert named_in(called()) is None
    values: tuple[Any, ...] = ([1], True, {}, "", "x" * 129, "a␟b")
    for body in ({"prefix_id": "a", "task_id": "b"}, *({"prefix_id": value} for value in values)):
        with pytest.raises(ApiError, match="prefix_id"):
            named_in(called(**body))


def test_the_field_of_a_body_comes_before_the_header() -> None:
    headers = {HEADER: "law"}
    assert named_in(Call(CHAT_COMPLETIONS, b"", {}, headers=headers)) == (HEADER, "law")
    call = Call(CHAT_COMPLETIONS, b"", {"task_id": "tax"}, headers=headers)
    assert named_in(call) == ("task_id", "tax")
