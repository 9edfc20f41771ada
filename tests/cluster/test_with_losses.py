"""A killed replica or router and a Redis that hangs or dies cost no request: the last tests."""

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
from openai import AsyncOpenAI, OpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.hits import wait_for_routers
from tests.support.scraping import attempts_that_failed, targets
from tests.support.serving import Cluster
from tests.support.waiting import until, wait_until
from tests.support.whole_fleet import wait_for_fleet
from tests.support.workloads import BLOCK, Answer, ask, people_table, user

STREAMS = 8  # two for each replica
TOKENS = 3000  # of each answer: a busy machine must kill the replica before they end
KILLS = 3  # tries to kill a replica before its answers end


async def recited(client: AsyncOpenAI, number: int, pieces: list[str]) -> str:
    """Return the text of a streamed answer; add the replica of each piece to `pieces`."""
    stream = await client.completions.create(
        model=BUILTIN_MODEL, prompt=f"{number} " * 20, max_tokens=TOKENS, stream=True, temperature=0
    )
    text = ""
    async for event in stream:
        text += "".join(choice.text for choice in event.choices)
        pieces.append(stream.response.headers["x-kvroute-replica"])
    return text


def replicas(cluster: Cluster) -> dict[str, int]:
    """Return the process id of each replica in the index, by replica id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in listed}


def health(cluster: Cluster) -> dict[str, Any]:
    """Return the answer of GET /health."""
    return dict(httpx.get(cluster.url + "/health", timeout=60).json())


async def test_a_killed_replica_costs_no_answer(cluster: Cluster) -> None:
    async with async_openai_client(cluster.url, timeout_s=120) as client:
        undisturbed = await asyncio.gather(*(recited(client, n, []) for n in range(STREAMS)))
        # The answers go on for 6 s. If the machine stands still for longer, the kill shows nothing:
        # then the test kills another replica.
        for _ in range(KILLS):
            if await kill_under(cluster, client, undisturbed):
                return
    raise AssertionError(f"the answers had ended before each of {KILLS} kills")


async def kill_under(cluster: Cluster, client: AsyncOpenAI, undisturbed: list[str]) -> bool:
    """Kill a replica that answers; return whether a router then had to continue an answer."""
    wait_for_fleet(cluster)
    failed, pids = attempts_that_failed(cluster), replicas(cluster)
    pieces: list[str] = []
    reciting = asyncio.gather(*(recited(client, n, pieces) for n in range(STREAMS)))
    await until(lambda: pieces)
    victim = pieces[0]
    os.kill(pids[victim], signal.SIGKILL)
    # Any other one that stands still for 2 s on a busy machine is missing, too: it is "silent".
    seen = health(cluster)
    while not {"lost", "starting"} & {*seen["missing"].values()}:
        await asyncio.sleep(0.1)
        seen = health(cluster)
    assert seen["replicas"] + len(seen["missing"]) == seen["wanted"] == 4
    assert await reciting == undisturbed
    has_continued = attempts_that_failed(cluster) > failed
    wait_for_fleet(cluster)
    await until(lambda: health(cluster)["missing"] == {})
    assert health(cluster)["replicas"] == 4
    await until(lambda: "is ready; 4 of 4 replicas are ready" in cluster.output())
    assert f"replica {victim} (process {pids[victim]}) has ended" in cluster.output()
    return has_continued


def test_a_killed_router_costs_no_request_that_has_got_no_byte(cluster: Cluster) -> None:
    """HAProxy sends these requests to the other router."""
    wait_for_fleet(cluster)
    before = targets(cluster, "router")
    body = {"model": BUILTIN_MODEL, "prompt": "1 2 3", "max_tokens": TOKENS, "temperature": 0}

    def ask() -> tuple[int, str]:
        answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
        return answer.status_code, answer.text and answer.json()["choices"][0]["text"]

    def running() -> int:
        listed = httpx.get(cluster.url + "/v1/cluster", timeout=60).json()["replicas"]
        return sum(replica["running"] for replica in listed)

    with ThreadPoolExecutor(STREAMS) as pool:
        asking = [pool.submit(ask) for _ in range(STREAMS)]
        wait_until(lambda: running() == STREAMS)
        cluster.routers()[0].kill()
        answers = {each.result() for each in asking}
    ((status, text),) = answers
    assert status == 200
    assert text
    wait_for_fleet(cluster)
    assert len(targets(cluster, "router").keys() - before) == 1


def test_requests_go_on_while_redis_hangs_and_dies_and_find_their_caches(
    cluster: Cluster, client: OpenAI
) -> None:
    before = user(people_table())
    answer = ask(client, before)
    full = (answer.prompt_tokens - 1) // BLOCK * BLOCK
    wait_for_routers(cluster, full, model=BUILTIN_MODEL, messages=before)
    (redis,) = cluster.named("redis-server")
    process = psutil.Process(redis.pid)
    process.suspend()
    try:
        # One chat, since new chats about the table would be spread over idle replicas in the end.
        chat, answers = before, list[Answer]()
        for number in range(10):
            chat = [*chat, {"role": "assistant", "content": answer.text}, *user(str(number))]
            answer = ask(client, chat)
            answers.append(answer)
    finally:
        process.kill()  # kvroute starts another one
    assert [answer.receipt for answer in answers if answer.cached_tokens <= 1000] == []
    cluster.wait_for("Redis is back after")
    fresh = user(f"After the outage. {people_table()}")
    full = (ask(client, fresh).prompt_tokens - 1) // BLOCK * BLOCK
    wait_for_routers(
        cluster, full, model=BUILTIN_MODEL, messages=fresh
    )  # they follow the index of the new Redis
