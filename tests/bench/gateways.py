"""`kvroute attach` and SGLang's gateway side by side: `python -m tests.bench.gateways`.

The servers behind them have no model and answer at once (stream/mock_engine.py). The load runs on
the same cores as the gateways, so costs are CPU times; latencies are those of this machine under
this load.
"""

import asyncio
import os
import random
import signal
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import aiohttp
import psutil

from tests.bench.agent_loops import text
from tests.bench.report import Row, Section
from tests.bench.stream.gateway import MISSING, gateway, is_installed, mock_engines, wait_for
from tests.bench.stream.load import Cost, Load, cpu_since, cpu_so_far, idle_cpu_s, measure
from tests.bench.stream.mock_engine import HOST
from tests.support.serving import ATTACH, launched

OURS, PEER = "kvroute attach", "sglang-router"
MODEL = "m"
DECODE_MS = 10.0
TOKENS = 200
SERVERS = 2
MANY_SERVERS = 18  # whose memory and idle time are compared with those of SERVERS
STREAMS = (1, 16, 64)
FLEET = 64  # servers that get RATE requests a second, while some of them are killed
RATE = 200.0
FLEET_S = 20.0
WORDS = 500
KILLED = 4
IDLE_S = 5.0
SETTLE_S = 3.0  # seconds after a start that do not count as idle


@dataclass(frozen=True)
class Started:
    """A gateway that answers."""

    port: int
    pid: int
    start_s: float

    @property
    def pids(self) -> list[int]:
        """Return the ids of its processes."""
        return [self.pid, *(child.pid for child in psutil.Process(self.pid).children(True))]

    def memory_mb(self) -> float:
        return sum(psutil.Process(pid).memory_info().rss for pid in self.pids) / 1e6


@contextmanager
def started(way: str, ports: list[int]) -> Iterator[Started]:
    """Run a gateway in front of the servers at these ports."""
    begun_s = time.perf_counter()
    if way == PEER:
        with gateway(ports) as (port, pid):
            yield Started(port, pid, time.perf_counter() - begun_s)
        return
    urls = [f"http://{HOST}:{port}" for port in ports]
    with launched(*urls, command=ATTACH) as running:
        wait_for(f"{running.url}/health", lambda: running.process.poll() is None)
        port = int(running.url.rpartition(":")[2])
        yield Started(port, running.process.pid, time.perf_counter() - begun_s)


@dataclass(frozen=True)
class Idle:
    start_s: float
    memory_mb: float
    cpu_share: float  # of a core


def idle(way: str, servers: int) -> Idle:
    """Start a gateway in front of this many servers, and measure it without requests."""
    with (
        mock_engines(servers, step_s=DECODE_MS / 1000) as engines,
        started(way, [*engines]) as running,
    ):
        time.sleep(SETTLE_S)
        spent = idle_cpu_s({way: running.pids}, seconds=IDLE_S)
        return Idle(running.start_s, running.memory_mb(), spent[way])


def loaded(way: str) -> Mapping[Load, tuple[Cost, Cost]]:
    """Return the costs behind a gateway and those at a server itself, which has its share."""
    loads = [Load(model=MODEL, concurrent=number, tokens=TOKENS) for number in STREAMS]
    loads.append(Load(model=MODEL, concurrent=16, tokens=1, streamed=False))
    with (
        mock_engines(SERVERS, step_s=DECODE_MS / 1000) as engines,
        started(way, [*engines]) as running,
    ):
        measure(running.port, loads[1], {way: running.pids})  # warms up
        return {
            load: (
                measure(running.port, load, {way: running.pids}),
                measure(next(iter(engines)), load, {}),
            )
            for load in loads
        }


@dataclass(frozen=True)
class Steady:
    """A steady load on a large fleet, of which servers are killed in the middle."""

    latencies_s: list[float]
    failed: int
    cpu_share: float  # of a core
    memory_mb: float


def steady(way: str) -> Steady:
    """Send requests at a fixed rate to a large fleet."""
    with (
        mock_engines(FLEET, step_s=DECODE_MS / 1000) as engines,
        started(way, [*engines]) as running,
    ):
        time.sleep(SETTLE_S)
        before = cpu_so_far({way: running.pids})
        victims = [*engines.values()][:KILLED]
        latencies_s, failed = asyncio.run(_at_a_fixed_rate(running.port, victims))
        spent = cpu_since(before, {way: running.pids})[way]
        return Steady(latencies_s, failed, spent / FLEET_S, running.memory_mb())


async def _at_a_fixed_rate(port: int, victims: Sequence[int]) -> tuple[list[float], int]:
    """Return the latencies of the answers in seconds, and how many requests have failed."""
    latencies_s: list[float] = []
    url = f"http://{HOST}:{port}/v1/chat/completions"
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        begun_s = time.perf_counter()

        async def ask(number: int) -> None:
            message = {"role": "user", "content": text(random.Random(number), WORDS)}
            body = {"model": MODEL, "messages": [message], "max_tokens": 1, "stream": False}
            sent_s = time.perf_counter()
            async with session.post(url, json=body) as response:
                await response.read()
                if response.status == 200:
                    latencies_s.append(time.perf_counter() - sent_s)

        count = int(RATE * FLEET_S)
        for number in range(count):
            await asyncio.sleep(begun_s + number / RATE - time.perf_counter())
            if number == count // 2:
                for victim in victims:
                    os.kill(victim, signal.SIGKILL)
            tasks.create_task(ask(number))
    return latencies_s, count - len(latencies_s)


def row_of_fleet(way: str) -> Row:
    measured = steady(way)
    cuts = statistics.quantiles(measured.latencies_s, n=100)
    return {
        "gateway": way,
        "failed requests": measured.failed,
        "p50 ms": 1000 * cuts[49],
        "p99 ms": 1000 * cuts[98],
        "% of a core": 100 * measured.cpu_share,
        "memory MB": measured.memory_mb,
    }


def row_of_idle(way: str) -> Row:
    few, many = idle(way, SERVERS), idle(way, MANY_SERVERS)
    more = MANY_SERVERS - SERVERS
    return {
        "gateway": way,
        "start s": few.start_s,
        f"start s, {MANY_SERVERS} servers": many.start_s,
        "memory MB": few.memory_mb,
        "MB a further server": (many.memory_mb - few.memory_mb) / more,
        "idle, % of a core": 100 * few.cpu_share,
        "idle, % a further server": 100 * (many.cpu_share - few.cpu_share) / more,
    }


def rows_of_load(way: str) -> Iterator[Row]:
    for load, (cost, alone) in loaded(way).items():
        units = cost.tokens if load.streamed else cost.answers
        us = 1e6 * cost.cpu_s[way] / units
        kind = "streams" if load.streamed else "short requests"
        yield {
            "gateway": way,
            "load": f"{load.concurrent} {kind}",
            "CPU us a token": us if load.streamed else None,
            "requests/s of a core": None if load.streamed else 1e6 / us,
            "TTFT p50 ms": cost.ttft_p50_ms,
            "TTFT p50 ms without it": alone.ttft_p50_ms,
            "TTFT p99 ms": cost.ttft_p99_ms,
            "gap p99 ms": cost.gap_p99_ms,
        }


def main() -> None:
    ways = [OURS, PEER] if is_installed() else [OURS]
    rows = [row_of_idle(way) for way in ways]
    print(Section("Without requests", rows).markdown(), flush=True)
    rows = [row_of_fleet(way) for way in ways]
    title = f"{FLEET} servers, {RATE:g} requests/s of {WORDS} words, {KILLED} servers killed"
    print("\n" + Section(title, rows).markdown(), flush=True)
    rows = [row for way in ways for row in rows_of_load(way)]
    notes = [] if is_installed() else [MISSING]
    print("\n" + Section(f"{TOKENS} tokens, {DECODE_MS:g} ms a token", rows, notes).markdown())


if __name__ == "__main__":
    main()
