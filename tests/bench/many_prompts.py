"""How long one body with many prompts delays the streams of other clients.

Run it as `python -m tests.bench.many_prompts [options of kvroute serve]`. A stream pauses when its
router or its replica is busy, and `/health` when the router is. The pauses without a body show what
the machine causes itself.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

import aiohttp

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.bench.report import Row, Section
from tests.support.serving import start_cluster

OPTIONS = ("--engine", "simulated", "--replicas", "2")
STREAMS = 4  # streams of other clients
PROMPT = "lorem ipsum dolor sit amet " * 300  # 8 KB
IDLE_S = 3.0  # seconds that are measured without a body
CALLS: dict[str, dict[str, object]] = {
    "64 texts": {"prompt": [PROMPT] * 64},
    "1024 texts": {"prompt": [PROMPT] * 1024},
    "1024 lists of token ids": {"prompt": [[7] * 1500] * 1024},
    "1024 texts, long streams": {"prompt": ["hi"] * 1024, "max_tokens": 64, "stream": True},
}


class Others:
    """Other clients: what they read, and their longest pause in seconds since `restart`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self.restart()

    def restart(self) -> None:
        self.stream_s = self.health_s = 0.0

    async def stream(self) -> None:
        while True:
            body = {**_body(max_tokens=4000, stream=True, ignore_eos=True), "prompt": "hello"}
            async with self._session.post("/v1/completions", json=body) as response:
                last_s = time.perf_counter()
                async for _ in response.content.iter_any():
                    now_s = time.perf_counter()
                    self.stream_s, last_s = max(self.stream_s, now_s - last_s), now_s

    async def ask(self) -> None:
        while True:
            begun_s = time.perf_counter()
            async with self._session.get("/health") as response:
                await response.read()
            self.health_s = max(self.health_s, time.perf_counter() - begun_s)


def many_prompts(options: Sequence[str] = OPTIONS) -> Section:
    """Measure the pauses that each of CALLS causes in a cluster with these options."""
    with start_cluster(*options) as cluster:
        rows = asyncio.run(_measure(cluster.url))
    return Section("Longest pauses of other clients during one body", rows)


async def _measure(url: str) -> list[Row]:
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(url, timeout=timeout) as session, asyncio.TaskGroup() as tasks:
        others = Others(session)
        running = [tasks.create_task(others.stream()) for _ in range(STREAMS)]
        running.append(tasks.create_task(others.ask()))
        await asyncio.sleep(IDLE_S)
        others.restart()
        await asyncio.sleep(IDLE_S)
        rows = [_row("none", others, IDLE_S)]
        for name, fields in CALLS.items():
            data = json.dumps({**_body(), **fields}).encode()
            others.restart()
            begun_s = time.perf_counter()
            headers = {"content-type": "application/json"}
            async with session.post("/v1/completions", data=data, headers=headers) as response:
                assert response.status == 200, await response.text()
                async for _ in response.content.iter_any():
                    pass
            rows.append(_row(name, others, time.perf_counter() - begun_s))
        for task in running:
            task.cancel()
    return rows


def _body(**fields: object) -> dict[str, object]:
    return {"model": BUILTIN_MODEL, "max_tokens": 1, **fields}


def _row(name: str, others: Others, took_s: float) -> Row:
    pauses = {"longest pause of a stream s": others.stream_s, "of /health s": others.health_s}
    return {"body": name, "answered after s": took_s, **pauses}


if __name__ == "__main__":
    print(many_prompts(tuple(sys.argv[1:]) or OPTIONS).markdown())
