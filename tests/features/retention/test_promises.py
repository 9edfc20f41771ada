"""Promises of clients to continue a conversation are read, or else ignored."""

import contextlib
import json
from collections.abc import Callable
from typing import Any

import anthropic
import httpx2
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.features.retention.router_retention import promises
from kvroute.router.api.calls import CHAT_COMPLETIONS, MESSAGES, parse_call
from kvroute.router.api.sessions import hints_of, session_number
from kvroute.router.sessions.turns import SessionHints

ID = "54c1eb09-bc4c-4d2f-98eb-6d2ab2d5e2fe"
EPHEMERAL = {"type": "ephemeral"}
HOUR = {"type": "ephemeral", "ttl": "1h"}
USER = {"role": "user", "content": "Hi"}


def is_promised_by(body: dict[str, Any]) -> bool:
    return promises(parse_call(CHAT_COMPLETIONS, json.dumps(body).encode()))


@pytest.mark.parametrize(
    "body",
    [
        {"cache_control": HOUR},
        {"system": [{"type": "text", "text": "Hi", "cache_control": HOUR}]},
        {"tools": [{"name": "f"}, {"name": "g", "cache_control": HOUR}]},
        {"messages": [USER, {**USER, "cache_control": HOUR}]},
        {"messages": [{**USER, "content": [{"type": "text", "cache_control": HOUR}]}]},
        {"input": [{**USER, "content": [{"type": "input_text", "cache_control": HOUR}]}]},
    ],
)
def test_a_cache_control_is_found_wherever_anthropic_allows_it(body: dict[str, Any]) -> None:
    assert is_promised_by(body)


@pytest.mark.parametrize(
    ("control", "is_promised"),
    [
        (EPHEMERAL, True),
        ({**EPHEMERAL, "ttl": "5m"}, True),
        (HOUR, True),
        ({**EPHEMERAL, "ttl": "9y"}, False),
        ({"type": "lasting"}, False),
        (None, False),
        ("1h", False),
    ],
)
def test_a_cache_control_of_a_known_ttl_is_a_promise(control: Any, is_promised: bool) -> None:
    parts = [{"type": "text", "text": "", "cache_control": control}]
    assert is_promised_by({"messages": [{**USER, "content": parts}]}) == is_promised


@pytest.mark.parametrize(
    ("body", "is_promised"),
    [
        ({"prompt_cache_retention": "24h"}, True),
        ({"prompt_cache_retention": "in_memory"}, False),
        ({"prompt_cache_retention": "in-memory"}, False),
        ({"prompt_cache_retention": 24}, False),
        ({"prompt_cache_options": {"ttl": "30m"}}, True),
        ({"prompt_cache_options": {"mode": "explicit"}}, False),
        ({"prompt_cache_key": ID}, False),
    ],
)
def test_openais_retention_fields_are_promises(body: dict[str, Any], is_promised: bool) -> None:
    assert is_promised_by(body) == is_promised


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.sampled_from([HOUR, "1h"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["cache_control", "type", "ttl", "content"]), inner, max_size=3
        )
    ),
    max_leaves=12,
)
FIELDS = (
    *("cache_control", "system", "tools", "input"),
    *("prompt_cache_retention", "prompt_cache_options", "prompt_cache_key"),
)


@given(st.dictionaries(st.sampled_from(FIELDS), JSON))
def test_unknown_values_of_other_apis_are_never_refused(body: dict[str, Any]) -> None:
    assert is_promised_by(body) in (False, True)


def sent(call: Callable[[httpx2.Client], object]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the body and the headers that a client library sends."""
    seen: list[httpx2.Request] = []

    def note(request: httpx2.Request) -> httpx2.Response:
        seen.append(request)
        return httpx2.Response(418, json={})

    with contextlib.suppress(openai.APIError, anthropic.APIError):
        call(httpx2.Client(transport=httpx2.MockTransport(note)))
    return json.loads(seen[0].content), dict(seen[0].headers)


def test_anthropics_client_sends_session_id_and_ttl_in_anthropics_fields() -> None:
    def ask(http: httpx2.Client) -> object:
        client = anthropic.Anthropic(api_key="none", http_client=http, max_retries=0)
        return client.messages.create(
            model="m",
            max_tokens=1,
            system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
            messages=[{"role": "user", "content": "Hi"}],
            metadata={"user_id": json.dumps({"session_id": ID})},
            cache_control={"type": "ephemeral", "ttl": "1h"},
        )

    body, headers = sent(ask)
    found = hints_of(headers, parse_call(MESSAGES, json.dumps(body).encode()), [promises])
    assert found == SessionHints(session_number("", ID), is_promised=True)


def test_openais_client_sends_our_fields_beside_its_own() -> None:
    def ask(http: httpx2.Client) -> object:
        client = openai.OpenAI(api_key="none", http_client=http, max_retries=0)
        return client.chat.completions.create(
            model="m",
            messages=[{"role": "user", "content": "Hi"}],
            prompt_cache_retention="24h",
            extra_headers={"X-Session-Id": ID},
            extra_body={"session_end": True},
        )

    body, headers = sent(ask)
    found = hints_of(headers, parse_call(CHAT_COMPLETIONS, json.dumps(body).encode()), [promises])
    assert found == SessionHints(session_number("", ID), is_end=True, is_promised=True)
