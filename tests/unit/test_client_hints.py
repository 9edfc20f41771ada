"""Session ids of clients and coding agents are read, or else ignored."""

import contextlib
import json
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from starlette.datastructures import Headers

from kvroute.features.gate import ANYONE, Caller
from kvroute.router.api.call_limits import MAX_NAME
from kvroute.router.api.calls import CHAT_COMPLETIONS, parse_call
from kvroute.router.api.errors import ApiError
from kvroute.router.api.sessions import AGENTS, SESSION, hints_of, session_number
from kvroute.router.sessions.turns import NO_HINTS, SessionHints

ID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"
USER = {"role": "user", "content": "Hi"}


def hints(
    body: dict[str, Any], headers: dict[str, str] | None = None, caller: Caller = ANYONE
) -> SessionHints:
    call = parse_call(CHAT_COMPLETIONS, json.dumps(body).encode())
    return hints_of(httpx.Headers(headers or {}), replace(call, caller=caller))


def session(body: dict[str, Any], headers: dict[str, str] | None = None) -> int:
    return hints(body, headers).session


def caller(tenant: str) -> Caller:
    return Caller(tenant, frozenset(), f"salt of {tenant}")


def test_a_request_without_hints_has_none() -> None:
    assert hints({"messages": [USER]}) == NO_HINTS
    assert hints({"session_id": None, "session_end": False}, {SESSION: ""}) == NO_HINTS


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        ({"session_id": ID}, {}),
        *(({}, {name.title(): ID}) for name in (SESSION, *AGENTS)),
        ({"metadata": {"user_id": f"user_0a1b_account__session_{ID}"}}, {}),
        ({"nvext": {"session_control": {"session_id": ID}}}, {}),
        ({"prompt_cache_key": ID}, {}),
        (
            {"metadata": {"user_id": json.dumps({"device_id": "d", "session_id": ID})}},
            {},
        ),
    ],
)
def test_a_session_id_can_be_in_several_fields_and_headers(
    body: dict[str, Any], headers: dict[str, str]
) -> None:
    assert session(body, headers) == session_number("", ID) > 0


def test_the_most_specific_session_id_wins() -> None:
    names = [*AGENTS[::-1], SESSION]
    headers = dict[str, str]()
    for name in names:
        headers[name] = name
        assert session({"metadata": {"user_id": f"_session_{ID}"}}, headers) == session_number(
            "", name
        )
    assert session({"session_id": ID}, headers) == session_number("", ID)


@pytest.mark.parametrize("value", [5, True, [ID], {"id": ID}, "x" * (MAX_NAME + 1)])
def test_an_invalid_session_id_is_refused(value: Any) -> None:
    with pytest.raises(ApiError, match="expected a string of up to 256 characters") as refused:
        hints({"session_id": value})
    assert (refused.value.status, refused.value.param) == (400, "session_id")


def test_a_long_session_id_is_refused_in_our_header_and_ignored_in_others() -> None:
    with pytest.raises(ApiError, match="x-session-id is"):
        hints({}, {SESSION: "x" * (MAX_NAME + 1)})
    assert session({}, {AGENTS[0]: "x" * (MAX_NAME + 1)}) == 0


def test_an_id_means_the_same_session_in_a_header_and_in_a_body() -> None:
    for id_ in ("gespräch-4711", "会話"):
        body = parse_call(CHAT_COMPLETIONS, json.dumps({"session_id": id_}).encode())
        for name in (SESSION, *AGENTS):
            sent = Headers(raw=[(name.encode(), id_.encode())])
            sent_hints = hints_of(sent, parse_call(CHAT_COMPLETIONS, b"{}"))
            assert sent_hints == hints_of({}, body) == SessionHints(session_number("", id_))
    latin = Headers(raw=[(SESSION.encode(), "gespräch".encode("latin-1"))])
    assert hints_of(latin, parse_call(CHAT_COMPLETIONS, b"{}")).session == session_number(
        "", "gespräch"
    )


@pytest.mark.parametrize(
    "headers",
    [
        {"x-dynamo-session-id": "child", "x-dynamo-parent-session-id": ID},
        {"x-session-id": "child", "x-parent-session-id": ID},
        {"x-session-affinity": "child", "x-parent-session-id": ID},
        {"session-id": "child", "thread-id": "child", "x-codex-parent-thread-id": ID},
        {"session-id": ID, "thread-id": "child", "x-codex-parent-thread-id": "another child"},
        {"x-claude-code-session-id": ID, "x-claude-code-agent-id": "child"},
    ],
)
def test_a_sub_agent_belongs_to_the_session_that_started_it(headers: dict[str, str]) -> None:
    assert session({}, headers) == session_number("", ID)


def test_the_end_of_a_sub_agent_is_not_the_end_of_its_session() -> None:
    assert hints({"session_end": True}, {SESSION: ID}).is_end
    assert not hints({"session_end": True}, {"x-parent-session-id": ID}).is_end


@pytest.mark.parametrize(("value", "is_end"), [("true", True), ("True", True), ("false", False)])
def test_dynamos_header_can_end_a_session(value: str, is_end: bool) -> None:
    headers = {"x-dynamo-session-id": ID, "x-dynamo-session-final": value}
    assert hints({}, headers) == SessionHints(session_number("", ID), is_end=is_end)


@pytest.mark.parametrize(("action", "is_end"), [("close", True), ("open", False)])
def test_dynamos_session_control_can_end_a_session(action: str, is_end: bool) -> None:
    control = {"session_id": ID, "action": action}
    found = hints({"nvext": {"session_control": control}, "prompt_cache_key": "shared"})
    assert found == SessionHints(session_number("", ID), is_end=is_end)


@pytest.mark.parametrize("value", ["true", 1, 0, [], {}])
def test_an_invalid_session_end_is_refused(value: Any) -> None:
    with pytest.raises(ApiError, match="expected true or false") as refused:
        hints({"session_end": value})
    assert (refused.value.status, refused.value.param) == (400, "session_end")


def test_a_request_can_be_the_last_of_its_session() -> None:
    assert hints({"session_end": True}).is_end


def test_sessions_of_different_tenants_and_salts_are_different() -> None:
    numbers = {
        hints({"session_id": ID, **own}, caller=who).session
        for who in (ANYONE, caller("a"), caller("b"))
        for own in ({}, {"cache_salt": "s"}, {"cache_salt": f"s{ID}"})
    }
    assert len(numbers) == 9


@given(st.tuples(st.text(), st.text()), st.tuples(st.text(), st.text()))
def test_two_sessions_have_two_numbers(one: tuple[str, str], other: tuple[str, str]) -> None:
    numbers = session_number(*one), session_number(*other)
    assert all(0 < number < 2**63 for number in numbers)
    assert (numbers[0] == numbers[1]) == (one == other)


def test_a_session_id_and_a_salt_are_hashed_separately() -> None:
    assert session_number("a", "bc") != session_number("ab", "c")


def test_sessions_count_for_a_tenant_else_for_a_salt() -> None:
    numbers = [
        hints({}, caller=caller("a")).tenant,
        hints({}, caller=caller("b")).tenant,
        hints({"cache_salt": "s"}).tenant,
    ]
    assert len({0, *numbers}) == 4
    assert all(0 < number < 2**31 for number in numbers)
    assert hints({"cache_salt": "s"}, caller=caller("a")).tenant == numbers[0]


def test_a_call_with_tools_has_tools() -> None:
    assert hints({"tools": [{"name": "f"}]}).has_tools
    assert not hints({"tools": []}).has_tools


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text() | st.just(ID),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["session_id", "user_id", "session_control", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)
OTHERS = ("metadata", "tools", "user", "nvext", "prompt_cache_key")  # fields of other APIs


@given(st.dictionaries(st.sampled_from(OTHERS), JSON))
def test_fields_of_other_apis_are_never_refused(body: dict[str, Any]) -> None:
    assert hints(body).session >= 0


@given(st.text() | JSON.map(json.dumps) | JSON.map(lambda id_: json.dumps({"session_id": id_})))
def test_any_user_id_is_read_or_ignored(user: str) -> None:
    assert session({"metadata": {"user_id": user}}) >= 0


@pytest.mark.parametrize(
    "user",
    [
        '{"session_id":' + "[" * 1000,
        '{"session_id":',
        json.dumps({"session_id": "x" * (MAX_NAME + 1)}),
        f"_session_{'x' * (MAX_NAME + 1)}",
        json.dumps({"x": "x" * 10_000, "session_id": ID}),
    ],
)
def test_a_user_id_that_is_too_deep_or_too_long_is_ignored(user: str) -> None:
    assert session({"metadata": {"user_id": user}}) == 0


@given(st.dictionaries(st.sampled_from(["session_id", "session_end", *OTHERS]), JSON))
def test_any_body_is_read_or_refused(body: dict[str, Any]) -> None:
    with contextlib.suppress(ApiError):
        hints(body)
