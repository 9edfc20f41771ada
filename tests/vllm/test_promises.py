"""What the README promises of a cluster of vLLM engines, on every API.

A prompt's second request finds it cached; a named prefix is cached before its first request.
"""

from typing import Any

import httpx
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.hits import wait_for_routers
from tests.support.serving import Cluster
from tests.support.workloads import BLOCK, people_table

DOCUMENT = people_table(20)
QUESTION = [{"role": "user", "content": DOCUMENT}]
# Path and body of the same request to each API.
SAME_PROMPT: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": DOCUMENT, "max_tokens": 8},
    "/v1/chat/completions": {"messages": QUESTION, "max_tokens": 8},
    "/v1/responses": {"input": QUESTION, "max_output_tokens": 8},
    "/v1/messages": {"messages": QUESTION, "max_tokens": 8},
}


@pytest.mark.parametrize("path", SAME_PROMPT)
def test_the_second_request_finds_its_prompt_cached(cluster: Cluster, path: str) -> None:
    def answer() -> httpx.Response:
        found = httpx.post(cluster.url + path, json=body, timeout=60)
        assert found.status_code == 200, found.text
        return found

    salt = path.replace("/", "-")
    body = {"model": BUILTIN_MODEL, "temperature": 0, "cache_salt": salt, **SAME_PROMPT[path]}
    first = answer()
    full = (prompt_tokens(first) - 1) // BLOCK * BLOCK
    assert full > 20 * BLOCK
    wait_for_routers(cluster, full, **body)
    second = answer()
    assert (cached_tokens(first), cached_tokens(second)) == (0, full)
    assert second.headers["x-kvroute-expected-tokens"] == str(full)
    assert second.headers["x-kvroute-replica"] == first.headers["x-kvroute-replica"]
    assert texts(second.json()) == texts(first.json())


def prompt_tokens(answer: httpx.Response) -> int:
    """Return all prompt tokens of an answer; Anthropic's API counts cached ones apart."""
    usage = answer.json()["usage"]
    names = ("prompt_tokens", "input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(name) or 0 for name in (*names, "cache_read_input_tokens"))


def cached_tokens(answer: httpx.Response) -> int:
    """Return how many of the prompt's tokens were cached."""
    usage = answer.json()["usage"]
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or usage
    return int(details.get("cached_tokens", details.get("cache_read_input_tokens")) or 0)


def texts(answer: Any) -> list[str]:
    """Return every text of an answer, in order."""
    if isinstance(answer, list):
        return [text for each in answer for text in texts(each)]
    if not isinstance(answer, dict):
        return []
    own = [answer[name] for name in ("text", "content") if isinstance(answer.get(name), str)]
    return own + [text for each in answer.values() for text in texts(each)]


CHATS: list[list[dict[str, Any]]] = [
    QUESTION,
    [{"role": "system", "content": "Be brief."}, *QUESTION],
    [*QUESTION, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Why?"}],
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "One."}, {"type": "text", "text": "2"}],
        }
    ],
]


@pytest.mark.parametrize("messages", CHATS)
def test_a_router_renders_chats_as_vllm_does(
    cluster: Cluster, messages: list[dict[str, Any]]
) -> None:
    """`/v1/route` counts the router's own tokens, `/tokenize` those of vLLM in a replica."""
    body: Any = {"model": BUILTIN_MODEL, "messages": messages}
    receipt = httpx.post(f"{cluster.url}/v1/route", json=body, timeout=60).json()["receipts"][0]
    tokens = httpx.post(f"{cluster.url}/tokenize", json=body, timeout=60).json()["tokens"]
    assert receipt["prompt_tokens"] == len(tokens)


def test_reminders_amid_a_session_of_claude_code_cost_no_cache(cluster: Cluster) -> None:
    """They are system messages behind tool results, and new in each turn."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Find the bug."}]
    body = {"model": BUILTIN_MODEL, "system": DOCUMENT, "max_tokens": 4, "temperature": 0}
    sent_before = 0
    for turn in range(5):
        left = f"<total_tokens>{90_000 - 977 * turn} tokens left</total_tokens>"
        messages.append({"role": "system", "content": left})
        full = {**body, "messages": messages, "cache_salt": "claude-code"}
        answer = httpx.post(f"{cluster.url}/v1/messages", json=full, timeout=60)
        assert answer.status_code == 200, answer.text
        assert cached_tokens(answer) >= 0.95 * (sent_before // BLOCK) * BLOCK
        sent_before = prompt_tokens(answer)
        wait_for_routers(cluster, (sent_before - 1) // BLOCK * BLOCK, **full)
        use = {"type": "tool_use", "id": f"toolu_{turn}", "name": "read", "input": {"line": turn}}
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "x = 1; " * 30}
        messages += [
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]


@pytest.mark.parametrize("task", ["1", "法律"])
def test_a_named_prefix_is_cached_at_the_first_request_of_every_replica(
    cluster: Cluster, task: str
) -> None:
    shown = httpx.get(f"{cluster.url}/v1/prefixes/{task}", timeout=120).json()
    assert shown["full_blocks"] > 10
    found: dict[str, int] = {}  # replica to the cached tokens of the first request there
    for number in range(40):
        body = {"model": BUILTIN_MODEL, "prompt": f"{number}?", "task_id": task, "max_tokens": 1}
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
        found.setdefault(answer.headers["x-kvroute-replica"], cached_tokens(answer))
        if len(found) == 2:
            break
    assert list(found.values()) == [shown["full_blocks"] * BLOCK] * 2


COUNTED: list[tuple[str, str, dict[str, Any]]] = [
    ("/tokenize", "/v1/completions", {"prompt": "May I?"}),
    ("/tokenize", "/v1/chat/completions", {"messages": QUESTION}),
    ("/v1/messages/count_tokens", "/v1/messages", {"messages": QUESTION}),
    ("/v1/responses/input_tokens", "/v1/responses", {"input": QUESTION}),
]


@pytest.mark.parametrize(("counting", "path", "own"), COUNTED)
def test_tokens_are_counted_with_their_named_prefix(
    cluster: Cluster, counting: str, path: str, own: dict[str, Any]
) -> None:
    body, headers = {"model": BUILTIN_MODEL, **own}, {"x-kvroute-prefix": "1"}
    counted = httpx.post(cluster.url + counting, json=body, headers=headers, timeout=60).json()
    limit = {"max_output_tokens" if path == "/v1/responses" else "max_tokens": 1}
    answer = httpx.post(cluster.url + path, json=body | limit, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert counted.get("count", counted.get("input_tokens")) == prompt_tokens(answer)


def test_counting_behind_a_prefix_takes_what_the_counting_routes_take(cluster: Cluster) -> None:
    headers = {"x-kvroute-prefix": "1"}
    thinking = {"type": "enabled", "budget_tokens": 2048}
    body: dict[str, Any] = {"model": BUILTIN_MODEL, "messages": QUESTION, "thinking": thinking}
    url = f"{cluster.url}/v1/messages/count_tokens"
    assert httpx.post(url, json=body, headers=headers, timeout=60).json()["input_tokens"] > 1000
    body = {"model": BUILTIN_MODEL, "prompt": "May I?", "return_token_strs": True}
    found = httpx.post(f"{cluster.url}/tokenize", json=body, headers=headers, timeout=60).json()
    assert len(found["token_strs"]) == found["count"]
    body["prompt"] = ["May I?", "Or not?"]
    refused = httpx.post(f"{cluster.url}/tokenize", json=body, headers=headers, timeout=60)
    assert refused.status_code == 400
