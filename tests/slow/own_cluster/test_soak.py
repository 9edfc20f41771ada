"""A cluster that is kept busy and has its replicas killed takes no more memory than at first."""

import asyncio
import itertools
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import httpx
import numpy as np
import psutil

from tests.support.serving import Cluster, start_cluster
from tests.support.waiting import until

REPLICAS = 3
CLIENTS = 8
VOCABULARY = 10_000  # token ids in a prompt
BLOCK = 16  # tokens
PROMPT = 500  # blocks
CAPACITY = 4000  # blocks of one replica
WARM_UP = 300_000  # blocks; fills the routers' history of evictions (EvictionHistory)
ROUNDS = 3
BLOCKS_A_ROUND = 60_000  # that the fleet computes and evicts again between two killings
GROWTH_BYTES = 8_000_000  # of one process


class Crowd:
    """Clients with prompts that nobody had before; one in three leaves amid the answer."""

    def __init__(self, cluster: Cluster) -> None:
        self.blocks = 0  # asked for
        self._rng = np.random.default_rng(0)
        self._http = httpx.AsyncClient(base_url=cluster.url, timeout=60)

    @asynccontextmanager
    async def asking(self) -> AsyncIterator[None]:
        async with self._http, asyncio.TaskGroup() as tasks:
            clients = [tasks.create_task(self._keep_asking()) for _ in range(CLIENTS)]
            yield
            for client in clients:
                client.cancel()

    async def _keep_asking(self) -> None:
        for number in itertools.count():
            token_ids = self._rng.integers(0, VOCABULARY, PROMPT * BLOCK).tolist()
            body = {"prompt": token_ids, "max_tokens": 10, "stream": True}
            self.blocks += PROMPT
            async with self._http.stream("POST", "/v1/completions", json=body) as response:
                assert response.status_code == 200, await response.aread()
                lines = response.aiter_lines()
                await anext(lines)
                if number % 3:
                    assert "data: [DONE]" in [line async for line in lines]


def replicas(cluster: Cluster) -> dict[str, int]:
    """Process ids, by id."""
    listed = httpx.get(cluster.url + "/v1/cluster", timeout=10).json()["replicas"]
    return {replica["id"]: replica["pid"] for replica in listed}


def routers(cluster: Cluster) -> list[int]:
    """Process ids."""
    return [router.pid for router in cluster.routers()]


def memory(pids: list[int]) -> dict[int, int]:
    """Bytes that are a process's own, by process id."""
    return {pid: psutil.Process(pid).memory_full_info().uss for pid in pids}


async def kill_often(cluster: Cluster, crowd: Crowd, rounds: int, spared: set[str]) -> None:
    """One replica in each round; the same ones are spared."""
    for _ in range(rounds):
        enough = crowd.blocks + BLOCKS_A_ROUND
        await until(lambda: crowd.blocks >= enough, within_s=120)  # noqa: B023
        victim, pid = next(item for item in replicas(cluster).items() if item[0] not in spared)
        os.kill(pid, signal.SIGKILL)
        await until(partial(is_replaced, cluster, victim), within_s=120)


def is_replaced(cluster: Cluster, replica_id: str) -> bool:
    found = replicas(cluster)
    return replica_id not in found and len(found) == REPLICAS


async def soak(rounds: int) -> list[tuple[int, int]]:
    """The memory of each router and of each replica that lived on, before and after, in bytes."""
    with start_cluster(
        *("--engine", "simulated", "--replicas", f"{REPLICAS}", "--routers", "2"),
        *("--block-size", f"{BLOCK}", "--simulated-blocks", f"{CAPACITY}"),
        *("--simulated-prefill-tokens-per-s", "0", "--simulated-decode-ms", "5"),
    ) as cluster:
        crowd = Crowd(cluster)
        fleet = replicas(cluster)
        spared = set(list(fleet)[1:])
        watched = routers(cluster) + [fleet[replica_id] for replica_id in spared]
        async with crowd.asking():
            await kill_often(cluster, crowd, 1, spared)
            await until(lambda: crowd.blocks >= WARM_UP, within_s=400)
            before, asked = memory(watched), crowd.blocks
            await kill_often(cluster, crowd, rounds, spared)
            after = memory(watched)
    assert crowd.blocks - asked >= rounds * BLOCKS_A_ROUND
    return [(before[pid], after[pid]) for pid in watched]


async def test_the_memory_of_a_busy_cluster_is_flat() -> None:
    memories = await soak(ROUNDS)
    assert max(after - before for before, after in memories) < GROWTH_BYTES, memories
