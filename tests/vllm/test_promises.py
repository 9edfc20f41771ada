"""What the README promises of a cluster of vLLM engines, on every API.

A prompt's second request finds it cached; a named prefix is cached before its first request; a
replica that is killed costs no client its answer.
"""

import asyncio
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import openai
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.hits import tell_routers
from tests.support.serving import Cluster
from tests.support.waiting import until
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
TOKENS = 500  # of each answer that a killed replica interrupts, or somewhat fewer
NOTE = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=TOKENS))
SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string", "enum": [NOTE]}},
    "required": ["note"],
    "additionalProperties": False,
}
TOOL = {"name": "note", "parameters": SCHEMA, "strict": True}


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
    tell_routers(cluster, full, **body)
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
        tell_routers(cluster, (sent_before - 1) // BLOCK * BLOCK, **full)
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
    shown = httpx.get(f"{cluster.url}/v1/prefixes/{task}", timeout=10).json()
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
]


@pytest.mark.parametrize(("counting", "path", "own"), COUNTED)
def test_tokens_are_counted_with_their_named_prefix(
    cluster: Cluster, counting: str, path: str, own: dict[str, Any]
) -> None:
    body, headers = {"model": BUILTIN_MODEL, **own}, {"x-kvroute-prefix": "1"}
    counted = httpx.post(cluster.url + counting, json=body, headers=headers, timeout=60).json()
    answer = httpx.post(
        cluster.url + path, json={**body, "max_tokens": 1}, headers=headers, timeout=60
    )
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


async def test_a_killed_replica_costs_no_client_its_answer(cluster: Cluster) -> None:
    """The last test of this cluster: streams of every API go on at the other replica."""
    undisturbed = await answers(cluster, lambda replica: None)
    begun: list[str] = []  # the replica that each piece of a completion came from

    running = asyncio.create_task(answers(cluster, begun.append))
    await until(lambda: len(begun) >= 40)
    os.kill(pid_of(cluster, begun[0]), signal.SIGKILL)
    assert not running.done()
    assert await running == undisturbed


def pid_of(cluster: Cluster, replica: str) -> int:
    """Return the process id of a replica."""
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return next(int(each["pid"]) for each in replicas if each["id"] == replica)


async def answers(cluster: Cluster, got: Callable[[str], None]) -> list[Any]:
    """Return the whole streamed answers of eight requests at once.

    Args:
        got: called with the replica of each piece of the completions, whose lengths are known.
    """
    salts = ("", "x", "yy", "zzz")  # prompts that differ, so that both replicas work
    async with (
        async_openai_client(cluster.url, timeout_s=120) as ours,
        anthropic.AsyncAnthropic(
            base_url=cluster.url, api_key="none", max_retries=0, timeout=120
        ) as claude,
    ):
        calls = [
            *(completion(ours, salt, got) for salt in salts),
            chat(ours),
            tool_call(ours),
            response(ours),
            message(claude),
        ]
        return await asyncio.gather(*calls)


async def completion(client: openai.AsyncOpenAI, salt: str, got: Callable[[str], None]) -> Any:
    stream = await client.completions.create(
        model=BUILTIN_MODEL,
        prompt=f"{salt} 1 2 3 4 5 6 7 8",
        max_tokens=TOKENS,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    text, usage = "", None
    async for event in stream:
        text += "".join(choice.text for choice in event.choices)
        usage = event.usage or usage
        got(stream.response.headers["x-kvroute-replica"])
    assert usage is not None
    assert usage.completion_tokens == TOKENS
    return text


async def chat(client: openai.AsyncOpenAI) -> Any:
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    return (await streamed_chat(client, {"response_format": form})).content


async def tool_call(client: openai.AsyncOpenAI) -> Any:
    tool = {"type": "function", "function": TOOL}
    message = await streamed_chat(client, {"tools": [tool], "tool_choice": "required"})
    return [(call.function.name, call.function.arguments) for call in message.tool_calls]


async def streamed_chat(client: openai.AsyncOpenAI, asked: dict[str, Any]) -> Any:
    body: Any = {"model": BUILTIN_MODEL, "messages": QUESTION, "temperature": 0, **asked}
    async with client.chat.completions.stream(**body, max_tokens=2 * TOKENS) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_completion()).choices[0].message


async def response(client: openai.AsyncOpenAI) -> Any:
    form = {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}}
    body: Any = {"model": BUILTIN_MODEL, "input": QUESTION, "temperature": 0, "text": form}
    async with client.responses.stream(**body, max_output_tokens=2 * TOKENS) as stream:
        async for _ in stream:
            pass
        return (await stream.get_final_response()).output_text


async def message(client: anthropic.AsyncAnthropic) -> Any:
    tool: Any = {"name": "note", "input_schema": SCHEMA, "strict": True}
    body: Any = {"model": BUILTIN_MODEL, "messages": QUESTION, "extra_body": {"temperature": 0}}
    forced: Any = {"tools": [tool], "tool_choice": {"type": "any"}, "max_tokens": 2 * TOKENS}
    async with client.messages.stream(**body, **forced) as stream:
        async for _ in stream:
            pass
        content: list[Any] = [*(await stream.get_final_message()).content]
        return [(use.name, use.input) for use in content]
