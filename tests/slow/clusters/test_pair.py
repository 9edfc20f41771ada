"""Two simulated replicas behind one router: shared work, a lost replica, a lost Redis."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from openai import OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.router.index.feed import POLL_S
from tests.support.clients import openai_client
from tests.support.scraping import total
from tests.support.serving import KVROUTE, Cluster
from tests.support.waiting import wait_until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import (
    BLOCK,
    ask,
    interleaved_chats,
    people_table,
    user,
)


@pytest.fixture
def client(pair: Cluster) -> Iterator[OpenAI]:
    with openai_client(pair) as client:
        yield client


@pytest.mark.parametrize(("system_words", "user_words"), [(0, 60), (80, 40), (400, 60)])
def test_interleaved_chats_keep_their_caches_and_share_the_work(
    client: OpenAI, system_words: int, user_words: int
) -> None:
    outcome = interleaved_chats(
        client,
        chats=8,
        turns=6,
        system_words=system_words,
        user_words=user_words,
        seed=system_words,
    )
    assert outcome.hit_share >= 0.95
    assert outcome.imbalance < 2.0


def test_a_chat_whose_system_message_has_a_new_id_each_turn_is_told_where_it_breaks(
    pair: Cluster, client: OpenAI, tmp_path: Path
) -> None:
    def chat(id_: str) -> list[dict[str, str]]:
        text = f"You are a clerk. Request {id_}. This is all that you know: {people_table()}"
        return [{"role": "system", "content": text}, *history]

    def broken() -> int:
        return total(pair, "router")["kvroute_prompt_tokens_total{broken}"]

    before, found = broken(), list[Any]()
    history: list[dict[str, str]] = user("Who is the oldest person in that table?")
    for id_ in ("a1", "b2", "c3"):
        answer: Any = client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=chat(id_),  # type: ignore[arg-type]
            max_tokens=16,
            extra_headers={"x-kvroute-receipt": "1"},
        )
        found.append(answer.kvroute_receipts[0]["broken"])
        text = answer.choices[0].message.content
        history += [{"role": "assistant", "content": text}, *user("And who is the next one?")]
    first, *later = found
    assert first is None
    for each in later:
        assert each["message"] == {"index": 0, "role": "system"}
        assert each["token"] == later[0]["token"] < 40
        assert each["before"]["tokens"] == each["after"]["tokens"] < 5
        assert each["kind"] == "a number"
        assert each["tokens"] > 10 * BLOCK
    lost = sum(each["tokens"] for each in later)
    wait_until(lambda: lost - 2 * BLOCK < broken() - before <= lost)

    file = tmp_path / "chat.json"
    file.write_text(json.dumps({"model": BUILTIN_MODEL, "messages": chat("d4")}))
    command = [*KVROUTE, "explain", "--body", str(file), "--url", pair.url]
    for _ in range(2):  # to ask changes nothing
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert f"The chat changed at token {later[0]['token']} (message 0, system)" in done.stdout


def test_two_clusters_on_one_computer_share_no_port(
    simulated_cluster: Cluster, pair: Cluster
) -> None:
    """Linux would let them, and give requests now to the one and now to the other."""
    assert listening(pair).isdisjoint(listening(simulated_cluster))


def listening(cluster: Cluster) -> set[int]:
    """Once its own port is among them: one HAProxy takes over from another after the start."""
    own = int(cluster.url.split(":")[-1])
    wait_until(lambda: own in ports_of(cluster))
    return ports_of(cluster)


def ports_of(cluster: Cluster) -> set[int]:
    ports = set[int]()
    for process in cluster.processes():
        with contextlib.suppress(psutil.NoSuchProcess):  # Ray's spare ones come and go
            connections = process.net_connections()
            ports |= {
                connection.laddr.port
                for connection in connections
                if connection.status == psutil.CONN_LISTEN
            }
    return ports


def pids(cluster: Cluster) -> dict[str, int]:
    """By replica id."""
    replicas = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in replicas}


def test_a_killed_replica_is_left_out_and_replaced(pair: Cluster, client: OpenAI) -> None:
    wait_for_fleet(pair)
    before = pids(pair)
    killed = ask(client, user(people_table())).replica
    os.kill(before[killed], signal.SIGKILL)
    for number in range(20):
        assert ask(client, user(f"{people_table()} {number}")).replica != killed
    wait_for_fleet(pair)


def test_without_redis_requests_go_on_and_still_find_their_caches(
    pair: Cluster, client: OpenAI
) -> None:
    """The last test of this cluster: kvroute starts another Redis, which is empty at first."""
    wait_until(lambda: ask(client, user(people_table())).expected_tokens > 1000)
    running = pids(pair)  # as Redis has them; the router reads them once in POLL_S
    time.sleep(3 * POLL_S)
    (redis,) = pair.named("redis-server")
    redis.kill()
    answers = [ask(client, user(f"{people_table()} {number}")) for number in range(10)]
    assert httpx.get(pair.url + "/health", timeout=60).status_code == 200
    wait_until(lambda: running.items() <= pids(pair).items())
    assert all(answer.cached_tokens > 1000 for answer in answers)
