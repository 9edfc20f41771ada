"""Random requests to every route, and a check of the responses."""

import json
import os
from collections.abc import Iterable
from typing import Any

import httpx
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from kvroute.contract.error_codes import type_of
from kvroute.features import ALL_CODES
from kvroute.features.prefixes.declaration import PrefixDeclaration
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.sim_engine.sampling import UNSUPPORTED, Chat, Completion
from tests.support.fuzzed_grammars import GRAMMARS

EXAMPLES = int(os.environ.get("KVROUTE_FUZZ", "320")) // 8  # number of examples for each test
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
BATCH = {"messages": [CHAT["messages"]] * 2, "max_tokens": 2}
SCORING = {"query": "Hello", "items": ["a", "b"], "label_token_ids": [1, 2]}
COMPLETION = {"prompt": "Hello", "max_tokens": 2}
ROUTED = ("model", "cache_salt", "prefix_id", "task_id", "tools")  # fields that routers read
RESPONSE = {"input": "Hello", "max_output_tokens": 2}
MESSAGE = CHAT
STATE = ("input", "instructions", "text", "store", "background", "previous_response_id", "stream")
ANTHROPICS = ("messages", "system", "stop_sequences", "thinking", "metadata", "stream")
PREFIX = {"id": "fuzzed", "prompt": "Hello", "pinned": False, "ttl_s": 1}
BASES: dict[str, tuple[dict[str, Any], Iterable[str]]] = {
    "/v1/chat/completions": (CHAT, {"messages", *ROUTED, *Chat.__struct_fields__}),
    "/v1/chat/completions/batch": (BATCH, {"messages", *ROUTED, *Chat.__struct_fields__}),
    "/generative_scoring": (SCORING, {*SCORING, *ROUTED}),
    "/invocations": (CHAT, {"messages", *ROUTED, *Chat.__struct_fields__}),
    "/v1/completions": (COMPLETION, {"prompt", *ROUTED, *Completion.__struct_fields__}),
    "/v1/responses": (RESPONSE, {*STATE, *ROUTED}),
    "/v1/messages": (MESSAGE, {*ANTHROPICS, *ROUTED}),
    "/v1/route": (COMPLETION, {"prompt", *ROUTED, *Completion.__struct_fields__}),
    "/v1/prefixes": (PREFIX, PrefixDeclaration.model_fields),
}
PATHS = (
    *("/health", "/metrics", "/version", "/v1", "/v1/models", "/v1/models/{}", "/v1/prefixes"),
    *("/v1/prefixes/{}", "/v1/cluster", "/v1/cluster/{}", "/v1/metrics/targets", "/{}"),
)
# Fields that are never set to null: the answer would have thousands of tokens.
LENGTHS = ("max_tokens", "max_completion_tokens", "min_tokens")
# Last events of streams.
ENDS = ("[DONE]", "message_stop", "response.completed", "response.incomplete")

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-5, 200)
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["", BUILTIN_MODEL, "user", "fuzzed", "all", "none", "x" * 3000])
)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text"]) | st.text(max_size=5), inner
        )
    ),
    max_leaves=8,
)
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\r\n"), max_size=40)
fuzzing = settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck), database=None)


def check(answer: httpx.Response) -> None:
    """Check that a response has the format of its route's API and is no error of the server."""
    assert answer.status_code < 500, answer.text
    if answer.status_code >= 400:
        error = answer.json()["error"]
        if answer.request.url.path.startswith("/v1/messages"):
            assert answer.json().keys() == {"type", "error"}
            assert error.keys() == {"message", "type"}
        else:
            assert error.keys() == {"message", "type", "param", "code"}
            assert error["type"] == type_of(answer.status_code)
            assert error["code"] in ALL_CODES
        assert 0 < len(error["message"]) < 2000
        return
    if answer.headers.get("content-type", "").startswith("text/event-stream"):
        events = [line for line in answer.text.splitlines() if line.startswith("data: ")]
        assert any(end in events[-1] for end in ENDS), events[-1]
    elif answer.headers.get("content-type", "").startswith("application/json"):
        assert isinstance(answer.json(), dict | list)


def changed(data: st.DataObject, path: str) -> dict[str, Any]:
    """Return a valid body with some fields changed."""
    base, fields = BASES[path]
    names = sorted({*fields, *UNSUPPORTED})
    body = dict(base)
    for name in data.draw(st.lists(st.sampled_from(names), max_size=3, unique=True)):
        value = data.draw(values | GRAMMARS.get(name, st.nothing()))
        if name not in LENGTHS or value is not None:
            body[name] = value
    return body


bodies = st.binary() | values.map(json.dumps).map(str.encode)  # any bytes, or any JSON
