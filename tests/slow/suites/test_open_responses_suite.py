"""Responses and events of streams against the models of the Open Responses specification.

The models are those of the package `openresponses-types`, made from the specification. The calls
are of the kinds of which the specification's own compliance suite has one each.
"""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.environments import environment
from tests.support.suites import PLUGINS, SUITE_TIMEOUT_S, Outcomes, Servers, compare
from tests.support.weather import CITIES

HELLO = [{"type": "message", "role": "user", "content": "Say hello in exactly 3 words."}]
PIRATE = {"type": "message", "role": "system", "content": "You are a pirate."}
HISTORY = [
    {"type": "message", "role": "user", "content": "My name is Alice."},
    {"type": "message", "role": "assistant", "content": "Hello Alice!"},
    {"type": "message", "role": "user", "content": "What is my name?"},
]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": list(CITIES)}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the current weather.",
    "parameters": SCHEMA,
    "strict": True,
}
CALL = {"input": HELLO, "tools": [WEATHER], "tool_choice": "required"}
TEXT = {"format": {"type": "json_schema", "name": "city", "schema": SCHEMA, "strict": True}}
LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
CALLS: dict[str, dict[str, Any]] = {
    "text": {"input": HELLO, "max_output_tokens": 12},
    "streamed text": {"input": HELLO, "max_output_tokens": 12, "stream": True},
    "log-probabilities": {"input": HELLO, "max_output_tokens": 3, **LOGPROBS},
    "streamed log-probabilities": {
        "input": HELLO,
        "max_output_tokens": 3,
        "stream": True,
        **LOGPROBS,
    },
    "system prompt": {"input": [PIRATE, *HELLO], "max_output_tokens": 12},
    "several turns": {"input": HISTORY, "max_output_tokens": 12},
    "instructions and metadata": {
        "input": "Hello",
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "max_output_tokens": 12,
    },
    "completed": {"input": HELLO, "text": TEXT},
    "streamed and completed": {"input": HELLO, "text": TEXT, "stream": True},
    "tool call": CALL,
    "streamed tool call": {**CALL, "stream": True},
}


def asked(url: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the response, or each event of the stream."""
    response = httpx.post(f"{url}/v1/responses", json={"model": BUILTIN_MODEL, **body}, timeout=60)
    response.raise_for_status()
    if not body.get("stream"):
        yield response.json()
        return
    for line in response.text.splitlines():
        if line.startswith("data: {"):
            yield json.loads(line.removeprefix("data: "))


def checked(url: str, python: Path) -> Outcomes:
    """Return what is wrong with the answer to each call."""
    outcomes = {}
    for name, body in CALLS.items():
        done = subprocess.run(
            [python, PLUGINS / "check_open_responses.py"],
            input=json.dumps([*asked(url, body)]),
            capture_output=True,
            text=True,
            check=True,
        )
        outcomes[name] = "; ".join(json.loads(done.stdout))
    return outcomes


@pytest.mark.timeout(SUITE_TIMEOUT_S)
def test_responses_and_events_follow_the_specification(servers: Servers) -> None:
    python = environment("open-responses")
    kvroute, stock = checked(servers.kvroute, python), checked(servers.stock, python)
    assert kvroute == dict.fromkeys(CALLS, "")
    compare(kvroute, stock, reasons={}, least_passed=len(CALLS))


@pytest.mark.parametrize("body", CALLS.values(), ids=CALLS)
def test_calls_end_as_they_should(body: dict[str, Any], servers: Servers) -> None:
    *_, last = asked(servers.kvroute, body)
    response = last.get("response", last)
    assert response["output"]
    assert response["status"] == ("incomplete" if "max_output_tokens" in body else "completed")
    if "tools" in body:
        assert response["output"][-1]["type"] == "function_call"
