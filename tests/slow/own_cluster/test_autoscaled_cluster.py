"""A real cluster finds its own size: it grows under load and shrinks after."""

import asyncio
import itertools
import subprocess
from typing import Any

import httpx
from openai import AsyncOpenAI

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.clients import async_openai_client
from tests.support.serving import KVROUTE, Cluster, start_cluster
from tests.support.waiting import until

# A real cluster, with engines that compute a thousand tokens a second.

SERVE = (
    *("--engine", "simulated", "--simulated-prefill-tokens-per-s", "1000"),
    *("--replicas", "1", "--max-replicas", "2", "--target-wait-s", "0.3", "--shrink-delay-s", "1"),
)
CLIENTS = 4  # each waits for seconds: the fleet shall grow
RULES = "You are a careful lawyer. Answer in one sentence and name the law. " * 20


async def test_a_cluster_grows_under_load_with_its_prefixes_warm_and_shrinks_after() -> None:
    with start_cluster(*SERVE) as cluster:
        declare(cluster, "rules", RULES)
        (old,) = replicas(cluster)
        await until(lambda: warm_on(cluster, "rules") == [old])
        answered_by, cached, numbers = set[str](), set[int](), itertools.count(1000)
        async with async_openai_client(cluster.url) as client, asyncio.TaskGroup() as burst:

            async def keep_busy() -> None:
                while answered_by <= {old}:
                    await complete(client, [next(numbers)] * 1000)  # a second of prefill

            for _ in range(CLIENTS):
                burst.create_task(keep_busy())
            while answered_by <= {old}:
                replica, tokens = await complete(client, "Why?", prefix_id="rules")
                answered_by.add(replica)
                cached.add(tokens)
        assert len(cached) == 1, f"{cached}: it was not warm before its first request"
        assert min(cached) > 200
        await until(lambda: replicas(cluster) == [old], within_s=180)
        refused = scale(cluster, 2)
        assert (refused.returncode, "autoscaling is on" in refused.stderr) == (1, True)


def declare(cluster: Cluster, id_: str, prompt: str) -> None:
    declared = {"id": id_, "prompt": prompt}
    httpx.post(f"{cluster.url}/v1/prefixes", json=declared, timeout=60).raise_for_status()


def warm_on(cluster: Cluster, id_: str) -> list[str]:
    """Ids of the replicas that have the prefix cached."""
    found: list[str] = httpx.get(f"{cluster.url}/v1/prefixes/{id_}", timeout=30).json()["warm_on"]
    return found


async def complete(client: AsyncOpenAI, prompt: Any, **body: Any) -> tuple[str, int]:
    """The replica that answered, and how many tokens it had cached."""
    raw = await client.completions.with_raw_response.create(
        model=BUILTIN_MODEL, prompt=prompt, max_tokens=1, extra_body=body
    )
    usage: Any = raw.parse().usage
    return raw.headers["x-kvroute-replica"], usage.prompt_tokens_details.cached_tokens


def scale(cluster: Cluster, replicas: int) -> subprocess.CompletedProcess[str]:
    command = [*KVROUTE, "scale", str(replicas), "--url", cluster.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def replicas(cluster: Cluster) -> list[str]:
    """Ids of those in the index."""
    listed = httpx.get(f"{cluster.url}/v1/cluster", timeout=10).json()["replicas"]
    return [replica["id"] for replica in listed]
