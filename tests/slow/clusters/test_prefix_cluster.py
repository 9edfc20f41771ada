"""Named prefixes on a real cluster with simulated engines, as their users see them."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI, NotFoundError

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.serving import KVROUTE, Cluster, redis_of
from tests.support.waiting import until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import ENGLISH

SYSTEM = [{"role": "system", "content": ENGLISH}]


@pytest.fixture
def cluster(named: Cluster) -> Cluster:
    return named


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[AsyncOpenAI]:
    async with async_openai_client(cluster.url) as client:
        yield client


def declare(cluster: Cluster, id_: str, **fields: Any) -> Any:
    answer = httpx.post(f"{cluster.url}/v1/prefixes", json={"id": id_, **fields}, timeout=30)
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def drop(cluster: Cluster, id_: str) -> None:
    assert httpx.delete(f"{cluster.url}/v1/prefixes/{id_}", timeout=30).status_code == 200


def shown(cluster: Cluster, id_: str) -> Any:
    return httpx.get(f"{cluster.url}/v1/prefixes/{id_}", timeout=30).json()


def is_warm(cluster: Cluster, id_: str, replicas: int = 3) -> bool:
    return len(shown(cluster, id_)["warm_on"]) == replicas


async def complete(client: AsyncOpenAI, prompt: str = "Why?", **body: Any) -> Any:
    """The usage of a short answer."""
    answer = await client.completions.create(
        model=BUILTIN_MODEL, prompt=prompt, max_tokens=2, extra_body=body
    )
    return answer.usage


def listed(cluster: Cluster) -> dict[str, int]:
    """Replica id -> pid."""
    replicas = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in replicas}


def full_tokens(prefix: Any) -> int:
    return int(prefix["tokens"] - prefix["partial_tokens"])


@pytest.mark.parametrize("task_id", [1, "1", "法律"])
async def test_tasks_of_the_file_are_cached_before_the_first_request(
    cluster: Cluster, client: AsyncOpenAI, task_id: int | str
) -> None:
    prefix = shown(cluster, str(task_id))
    usage = await complete(client, f"{task_id!r} Why?", task_id=task_id)
    assert (len(prefix["warm_on"]), prefix["pinned"]) == (3, True)
    assert usage.prompt_tokens > prefix["tokens"] > 700
    assert usage.prompt_tokens_details.cached_tokens == full_tokens(prefix)


async def test_a_chat_goes_on_from_messages_through_the_openai_client(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    prefix = declare(cluster, "chat", messages=SYSTEM)
    await until(lambda: is_warm(cluster, "chat"))
    asked = {"role": "user", "content": "Why?"}
    usages = []
    for messages, more in (([asked], {"prefix_id": "chat"}), ([*SYSTEM, asked], {})):
        answer: Any = await client.chat.completions.create(
            model=BUILTIN_MODEL,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=2,
            extra_body=more,
        )
        usages.append(answer.usage)
    assert usages[0].prompt_tokens == usages[1].prompt_tokens
    assert usages[0].prompt_tokens_details.cached_tokens == full_tokens(prefix)
    assert usages[1].prompt_tokens_details.cached_tokens >= full_tokens(prefix)


async def test_what_a_prefix_saved_is_counted(cluster: Cluster, client: AsyncOpenAI) -> None:
    prefix = declare(cluster, "counted", prompt=f"counted {ENGLISH}", replicas=2)
    await until(lambda: is_warm(cluster, "counted", replicas=2))
    cached = [
        (await complete(client, f"{n}?", prefix_id="counted")).prompt_tokens_details.cached_tokens
        for n in range(4)
    ]
    hits = [min(tokens, full_tokens(prefix)) for tokens in cached if tokens]
    await until(lambda: shown(cluster, "counted")["hits"] == len(hits))
    assert shown(cluster, "counted")["tokens_saved"] == sum(hits)
    assert hits


async def test_an_unknown_prefix_never_runs(cluster: Cluster, client: AsyncOpenAI) -> None:
    with pytest.raises(NotFoundError, match="did you mean '法律'") as refusal:
        await complete(client, task_id="法律2")
    assert refusal.value.param == "task_id"


async def test_a_dropped_prefix_is_unknown_to_every_router(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    async def is_known() -> bool:
        with contextlib.suppress(NotFoundError):
            return bool(await complete(client, prefix_id="gone"))
        return False

    declare(cluster, "gone", prompt="You are brief.")
    assert await is_known()
    drop(cluster, "gone")
    async with asyncio.timeout(10):
        while any([await is_known() for _ in range(8)]):
            pass


async def test_an_update_under_twenty_streams_fails_and_mixes_nothing(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    """Each version has a length of its own, so that a prompt's tokens tell which one it had."""
    sizes = {declare(cluster, "law", prompt=f"one {ENGLISH}")["tokens"]}
    await until(lambda: is_warm(cluster, "law"))
    alone = (await complete(client, "Why?")).prompt_tokens
    seen: list[int] = []
    done = asyncio.Event()

    async def stream_on() -> None:
        while not done.is_set():
            stream = await client.completions.create(
                model=BUILTIN_MODEL,
                prompt="Why?",
                max_tokens=20,
                stream=True,
                stream_options={"include_usage": True},
                extra_body={"prefix_id": "law"},
            )
            events: list[Any] = [event async for event in stream]
            seen.append(events[-1].usage.prompt_tokens - alone)

    streams = [asyncio.create_task(stream_on()) for _ in range(20)]
    for version in range(2, 4):
        heard = len(seen)
        await until(lambda: len(seen) > heard)  # noqa: B023
        sizes.add(declare(cluster, "law", prompt=f"{'more ' * version}{ENGLISH}")["tokens"])
        newest = max(sizes)
        await until(lambda: seen[-1] == newest)  # noqa: B023
        await until(lambda: shown(cluster, "law")["version_in_use"] == version)  # noqa: B023
    done.set()
    await asyncio.gather(*streams)
    assert set(seen) == sizes
    async with asyncio.timeout(30):  # the other router may hear of it a moment later
        while (await complete(client, prefix_id="law")).prompt_tokens - alone != max(sizes):
            await asyncio.sleep(0.2)


async def test_declarations_outlive_redis(cluster: Cluster, client: AsyncOpenAI) -> None:
    with redis_of(cluster) as connection:
        before = shown(cluster, "1")
        connection.flushall()
        await until(lambda: connection.keys("kvroute:*:prefixes"))
    await until(lambda: is_warm(cluster, "1"), within_s=20)
    assert shown(cluster, "1")["version"] == before["version"]
    usage = await complete(client, "And after that?", task_id=1)
    assert usage.prompt_tokens_details.cached_tokens == full_tokens(before)


def test_the_command_declares_waits_lists_and_drops(cluster: Cluster, tmp_path: Path) -> None:
    def kvroute(*args: str) -> subprocess.CompletedProcess[str]:
        command = [*KVROUTE, "prefixes", *args, "--url", cluster.url]
        env = {**os.environ, "COLUMNS": "200"}
        return subprocess.run(command, capture_output=True, text=True, timeout=60, env=env)

    file = tmp_path / "rules.txt"
    file.write_text(f"rules {ENGLISH}")
    added = kvroute("add", "rules", str(file), "--replicas", "2")
    assert "rules: version 1," in added.stdout
    assert "warm on 2 of 2 replicas" in added.stdout
    assert "rules" in kvroute("list").stdout
    assert kvroute("rm", "rules").stdout == "rules: dropped\n"
    again = kvroute("rm", "rules")
    assert (again.returncode, again.stdout) == (1, "")
    assert "no prefix of this name" in again.stderr


async def test_a_killed_replicas_successor_is_warm_before_it_serves(
    cluster: Cluster, client: AsyncOpenAI
) -> None:
    wait_for_fleet(cluster)
    prefix, before = shown(cluster, "1"), listed(cluster)
    victim = next(iter(before))
    os.kill(before[victim], signal.SIGKILL)
    served: dict[str, int] = {}  # replica -> cached tokens of its first request
    number = 0
    while len(set(served) - set(before)) < 1:
        number += 1
        raw = await client.completions.with_raw_response.create(
            model=BUILTIN_MODEL, prompt=f"{number}?", max_tokens=2, extra_body={"task_id": 1}
        )
        usage = raw.parse().usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        served.setdefault(raw.headers["x-kvroute-replica"], cached)
    assert set(served.values()) == {full_tokens(prefix)}
    wait_for_fleet(cluster)
