"""The cost of metrics: the same requests to a cluster with metrics and to one without.

Both clusters run at the same time and get requests alternately, so that other load on the machine
affects both equally. Each round has a half for each cluster, and the two halves are compared. In
each round, the metrics of every process are read once.
"""

import asyncio
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import numpy as np
import requests

from tests.bench.report import Section
from tests.bench.routers import Turn, _ask
from tests.support.scraping import targets
from tests.support.serving import Cluster, start_cluster

ROUNDS = 9
REQUESTS = 800  # number of requests in each half of a round
CONCURRENT = 16
PROMPT_TOKENS = 500
OPTIONS = ("--engine", "simulated", "--replicas", "1", "--simulated-decode-ms", "0")
INSTANT = ("--simulated-prefill-tokens-per-s", "0")
ROLES = ("router", "replica")


@dataclass(frozen=True)
class Half:
    """The results of one cluster in one round."""

    requests_per_s: float
    cpu_ms: dict[str, float]  # role -> CPU time per request


def metrics() -> Section:
    with (
        start_cluster(*OPTIONS, *INSTANT) as on,
        start_cluster(*OPTIONS, *INSTANT, "--no-metrics") as off,
    ):
        rounds = asyncio.run(_measure([on, off]))
    pairs = [(_row(on), _row(off)) for on, off in rounds]
    ratios = {name: [on[name] / off[name] for on, off in pairs] for name in pairs[0][0]}
    lower, median, upper = (
        {name: statistics.quantiles(values)[quartile] for name, values in ratios.items()}
        for quartile in range(3)
    )
    return Section(
        f"Metrics on and off, {ROUNDS} rounds of {REQUESTS} requests to each cluster, one router",
        [
            {"metrics": "on", **_medians([on for on, _ in pairs])},
            {"metrics": "off", **_medians([off for _, off in pairs])},
            {"metrics": "on / off, median of the rounds", **median},
            {"metrics": "... lower quartile", **lower},
            {"metrics": "... upper quartile", **upper},
        ],
    )


def _medians(rows: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def _row(half: Half) -> dict[str, float]:
    cpu = {f"{role}'s CPU ms a request": ms for role, ms in half.cpu_ms.items()}
    return {"requests/s": half.requests_per_s, **cpu}


async def _measure(clusters: Sequence[Cluster]) -> list[tuple[Half, Half]]:
    """Measure all rounds. The cluster that is first alternates."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        for cluster in clusters:
            await _half(session, cluster, 0)
        rounds = []
        for number in range(1, ROUNDS + 1):
            order = clusters if number % 2 else clusters[::-1]
            halves = [await _half(session, cluster, number) for cluster in order]
            on, off = halves if number % 2 else halves[::-1]
            rounds.append((on, off))
        return rounds


async def _half(session: aiohttp.ClientSession, cluster: Cluster, seed: int) -> Half:
    rng = np.random.default_rng(seed)
    prompts = iter(rng.integers(1000, 40_000, (REQUESTS, PROMPT_TOKENS)).tolist())

    async def worker() -> None:
        for prompt in prompts:
            await _ask(session, cluster.url, Turn(0.0, prompt))

    cpu_s, begun_s = _cpu_s(cluster), time.perf_counter()
    reading = asyncio.to_thread(_read, cluster)
    await asyncio.gather(reading, *(worker() for _ in range(CONCURRENT)))
    took_s = time.perf_counter() - begun_s
    spent_s = {role: after - cpu_s[role] for role, after in _cpu_s(cluster).items()}
    return Half(REQUESTS / took_s, {role: 1000 * s / REQUESTS for role, s in spent_s.items()})


def _read(cluster: Cluster) -> None:
    """Read all metrics of a cluster, as Prometheus does; none if it has no metrics."""
    for role in ROLES:
        for address in targets(cluster, role).values():
            requests.get(f"http://{address}/metrics", timeout=10).raise_for_status()


def _cpu_s(cluster: Cluster) -> dict[str, float]:
    """Return the CPU time so far: role -> seconds. Each role has one process."""
    spent_s = {}
    for process in cluster.processes():
        for role in ROLES:
            if f"kvroute:{role.title()}" in " ".join(process.cmdline()):
                times = process.cpu_times()
                spent_s[role] = times.user + times.system
    return spent_s
