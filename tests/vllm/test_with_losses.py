"""A replica that is killed costs no client its answer: the last tests of the vLLM cluster."""

import asyncio
import os
import random
import re
import signal
from collections.abc import Callable

import httpx
import psutil

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.bodies import (
    ASK,
    CHATS,
    COMPLETIONS,
    MESSAGES,
    NAMED,
    RESPONSES,
    STRICT,
    Body,
    comparable,
)
from tests.support.event_streams import Joined
from tests.support.scraping import attempts_that_failed
from tests.support.serving import Cluster
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet

TOKENS = 300  # of each answer, or somewhat fewer
# How many of the calls have begun when a replica is killed, in each round. On a loaded machine, the
# first answers can have ended when the last ones begin, so a further round kills earlier.
BEGUN = (1.0, 0.5, 0.3, 0.2)
NOTE = "".join(random.Random(1).choices("abcdefghijklmnopqrstuvwxyz", k=TOKENS))
SCHEMA = {
    "type": "object",
    "properties": {"note": {"type": "string", "enum": [NOTE]}},
    "required": ["note"],
    "additionalProperties": False,
}
FORM = {"name": "note", "schema": SCHEMA, "strict": True}
TOOL = {**STRICT, "function": {"name": "get_weather", "parameters": SCHEMA, "strict": True}}
USAGE = {"stream_options": {"include_usage": True}}
PARROTS = {"prompt": "🦜🐢" * 20, "max_tokens": TOKENS, "ignore_eos": True, **USAGE}
LONG = {"messages": ASK, "max_tokens": TOKENS, "ignore_eos": True, **USAGE}
FORMED = {"messages": ASK, "max_tokens": 2 * TOKENS}
RESPONSE = {"input": ASK, "max_output_tokens": TOKENS, "ignore_eos": True}
CALLS: list[tuple[str, Body]] = [
    (COMPLETIONS, PARROTS),
    (COMPLETIONS, {**PARROTS, "logprobs": 2}),
    (COMPLETIONS, {**PARROTS, "echo": True, "prompt": [*range(100, 140)]}),
    (COMPLETIONS, {**PARROTS, "return_token_ids": True, "frequency_penalty": 0.5}),
    (CHATS, LONG),
    (CHATS, {**LONG, "logprobs": True, "top_logprobs": 2}),
    (CHATS, {**FORMED, "response_format": {"type": "json_schema", "json_schema": FORM}}),
    (CHATS, {**FORMED, "tools": [TOOL], "tool_choice": NAMED}),
    (CHATS, {**FORMED, "tools": [TOOL], "tool_choice": "required", "logprobs": True}),
    (RESPONSES, RESPONSE),
    (
        RESPONSES,
        {
            "input": ASK,
            "max_output_tokens": 2 * TOKENS,
            "text": {"format": {"type": "json_schema", **FORM}},
        },
    ),
    (
        MESSAGES,
        {
            "messages": ASK,
            "max_tokens": 2 * TOKENS,
            "tools": [{"name": "note", "input_schema": SCHEMA}],
            "tool_choice": {"type": "any"},
        },
    ),
]

# These cannot go on exactly, and end in an error event of their API.
CANNOT: list[tuple[str, Body]] = [
    (COMPLETIONS, {**PARROTS, "presence_penalty": 0.5}),
    (RESPONSES, {**RESPONSE, "top_logprobs": 2, "include": ["message.output_text.logprobs"]}),
]
ALL = CALLS + CANNOT
# What a stream gets while it waits for its first event.
SIGN_OF_LIFE = re.compile(rb"^(:.*|event: ping\ndata: .*)\n\n", re.MULTILINE)
ERRORS = {COMPLETIONS: 'data: {"error"', RESPONSES: "event: error\n"}


async def test_every_field_of_every_event_is_as_if_no_replica_had_been_killed(
    cluster: Cluster,
) -> None:
    undisturbed = await answers(cluster, lambda call, replica: None)
    for share in BEGUN:
        failed = attempts_that_failed(cluster)
        disturbed = await answers_with_a_killed_replica(cluster, round(share * len(ALL)))
        for call, before, after in zip(ALL, undisturbed, disturbed, strict=True):
            cut = call in CANNOT and ERRORS[call[0]] in after
            assert cut or Joined(comparable(after)) == Joined(comparable(before)), call
        if attempts_that_failed(cluster) - failed >= 2:
            return
    raise AssertionError("in each round, the answers had ended before the kill")


async def answers_with_a_killed_replica(cluster: Cluster, calls: int) -> list[str]:
    """Return the streams of all calls.

    When so many of them have begun, the replica of the latest one is killed.
    """
    begun: dict[int, str] = {}  # call to the replica that its first events came from

    wait_for_fleet(cluster)
    pids = running_replicas(cluster)
    running = asyncio.create_task(answers(cluster, begun.__setitem__))
    await until(lambda: len(begun) >= calls, within_s=240)
    latest = next(filter(None, reversed(begun.values())), min(pids))
    os.kill(pids[latest], signal.SIGKILL)
    return await running


async def answers(cluster: Cluster, got: Callable[[int, str], None]) -> list[str]:
    """Return the streams of all calls, sent at once.

    Args:
        got: called with a call's number and its replica when its first events have come.
    """
    async with httpx.AsyncClient(base_url=cluster.url, timeout=240) as client:
        sent = (answer(client, number, got) for number in range(len(ALL)))
        return await asyncio.gather(*sent)


async def answer(client: httpx.AsyncClient, number: int, got: Callable[[int, str], None]) -> str:
    """Return one call's stream."""
    path, own = ALL[number]
    body = {"model": BUILTIN_MODEL, "temperature": 0, "stream": True, **own}
    data = b""
    async with client.stream("POST", path, json=body) as response:
        async for some in response.aiter_bytes():
            data = SIGN_OF_LIFE.sub(b"", data + some)
            if data:  # a stream that has waited for long has no header with the replica
                got(number, response.headers.get("x-kvroute-replica", ""))
    assert response.status_code == 200, data
    return data.decode()


def running_replicas(cluster: Cluster) -> dict[str, int]:
    """Return the process id of each replica whose process exists."""
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=120).json()["replicas"]
    pids = {replica["id"]: replica["pid"] for replica in replicas}
    return {replica: pid for replica, pid in pids.items() if psutil.pid_exists(pid)}
