"""Clients name their conversations and end them, on a cluster with two routers."""

from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.api.sessions import session_number
from kvroute.router.observability.request_log import ID_BITS
from tests.support.clients import openai_client
from tests.support.json_lines import read_lines
from tests.support.serving import Cluster
from tests.support.waiting import wait_until
from tests.support.workloads import user

TRIES = 3  # a busy replica is late once, a fault always
MARKED = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
        ],
    }
]


def ask(client: openai.OpenAI, messages: Any, **options: Any) -> None:
    client.chat.completions.create(model=BUILTIN_MODEL, messages=messages, max_tokens=4, **options)


def turns_of(log: Path, id_: str) -> list[dict[str, Any]]:
    """The logged turns of a session."""
    number = session_number("", id_) & ID_BITS
    lines = read_lines(sorted(log.glob("*.jsonl")))
    return [line for line in lines if line.get("session") == number]


def test_turns_are_logged_under_their_session(
    simulated_cluster: Cluster, request_log: Path
) -> None:
    with openai_client(simulated_cluster) as client:
        ask(client, MARKED, extra_headers={"x-session-id": "turns"}, prompt_cache_retention="24h")
        ask(client, MARKED, extra_headers={"x-claude-code-session-id": "turns"})
        ask(client, MARKED, extra_body={"session_id": "turns", "session_end": True})
    wait_until(lambda: len(turns_of(request_log, "turns")) == 3)
    ends = [line.get("session_end", False) for line in turns_of(request_log, "turns")]
    assert sorted(ends) == [False, False, True]


def test_a_session_ends_on_every_replica_and_may_go_on(simulated_cluster: Cluster) -> None:
    found = list[dict[str, str]]()
    while not found or found[-1]:
        assert len(found) < TRIES, found
        found.append(unanswered(simulated_cluster))


def unanswered(cluster: Cluster) -> dict[str, str]:
    """Replicas that did not take note in time when either router ended a session."""
    named, found = {"x-session-id": "ended"}, dict[str, str]()
    with openai_client(cluster) as client, httpx.Client(timeout=60) as http:
        for _ in range(4):
            ask(client, user("Hello"), extra_headers=named)
            answer = http.delete(f"{cluster.url}/v1/sessions/ended")
            assert answer.status_code == 200
            found |= answer.json()["unanswered"]
    return found


def test_what_is_no_session_is_refused(simulated_cluster: Cluster) -> None:
    with openai_client(simulated_cluster) as client:
        for field, value in (("session_id", 5), ("session_end", "yes")):
            with pytest.raises(openai.BadRequestError) as refused:
                ask(client, user("Hello"), extra_body={field: value})
            assert (refused.value.param, refused.value.code) == (field, "invalid_value")
