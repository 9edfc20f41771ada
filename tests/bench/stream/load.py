"""Chats over raw sockets, and what they cost other processes."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop

from tests.bench.stream.caller import Caller, Tally

RAMP_S = 1.0  # in which all connections begin
SETTLE_S = 1.5  # from then on until it counts

Processes = Mapping[str, Sequence[int]]  # role -> process ids


@dataclass(frozen=True, kw_only=True)
class Load:
    model: str
    concurrent: int
    tokens: int  # of each answer
    streamed: bool = True
    window_s: float = 5.0


@dataclass(frozen=True)
class Cost:
    """Of a window amid a steady load."""

    seconds: float
    tokens: int
    events: int
    answers: int
    ttft_p50_ms: float | None  # None: no answer began
    ttft_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    cpu_s: Mapping[str, float]  # of each role


def measure(port: int, load: Load, processes: Processes) -> Cost:
    """At that port of this machine."""
    return uvloop.run(_amid(port, load, processes))


def idle_cpu_s(processes: Processes, *, seconds: float) -> dict[str, float]:
    """CPU seconds in each second, of each role, while nobody asks."""
    before = cpu_so_far(processes)
    time.sleep(seconds)
    return {role: cpu_s / seconds for role, cpu_s in cpu_since(before, processes).items()}


def cost(tally: Tally, seconds: float, cpu_s: Mapping[str, float]) -> Cost:
    ttft_p50_ms, ttft_p99_ms = _quantiles_ms(tally.ttft_s)
    gap_p50_ms, gap_p99_ms = _quantiles_ms(tally.gaps_s)
    return Cost(
        seconds=seconds,
        tokens=tally.tokens,
        events=tally.events,
        answers=tally.answers,
        ttft_p50_ms=ttft_p50_ms,
        ttft_p99_ms=ttft_p99_ms,
        gap_p50_ms=gap_p50_ms,
        gap_p99_ms=gap_p99_ms,
        cpu_s=cpu_s,
    )


def first_tokens(load: Load) -> list[int]:
    """Of the first answer of each stream, so that later ones begin and end evenly in time."""
    return [-(-number * load.tokens // load.concurrent) for number in range(1, load.concurrent + 1)]


async def _amid(port: int, load: Load, processes: Processes) -> Cost:
    failed = asyncio.get_running_loop().create_future()
    callers = await _connect(port, load, failed)
    await _unless(failed, SETTLE_S)
    tally = Tally()
    for caller in callers:
        caller.tally = tally
    before, begun_s = cpu_so_far(processes), time.perf_counter()
    await _unless(failed, load.window_s)
    spent_s = cpu_since(before, processes)
    found = cost(tally, time.perf_counter() - begun_s, spent_s)
    failed.cancel()
    for caller in callers:
        caller.close()
    return found


async def _connect(port: int, load: Load, failed: asyncio.Future[None]) -> list[Caller]:
    callers = []
    for first in first_tokens(load):
        caller = Caller(
            port, load.model, tokens=load.tokens, first=first, streamed=load.streamed, failed=failed
        )
        await caller.connect()
        callers.append(caller)
        await _unless(failed, RAMP_S / load.concurrent)
    return callers


async def _unless(failed: asyncio.Future[None], seconds: float) -> None:
    """Waits; raises what goes wrong meanwhile."""
    done, _ = await asyncio.wait([failed], timeout=seconds)
    for each in done:
        each.result()


def cpu_so_far(processes: Processes) -> dict[str, float]:
    """So far, of each role; to the nanosecond, as clock_getcpuclockid(3) finds a clock."""
    return {
        role: sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)
        for role, pids in processes.items()
    }


def cpu_since(before: Mapping[str, float], processes: Processes) -> dict[str, float]:
    """What each role has taken since cpu_so_far() said that."""
    return {role: after - before[role] for role, after in cpu_so_far(processes).items()}


def _quantiles_ms(times_s: Sequence[float]) -> tuple[float | None, float | None]:
    """The median and the 99th percentile."""
    if not times_s:
        return None, None
    if len(times_s) == 1:
        return 1000 * times_s[0], 1000 * times_s[0]
    return 1000 * statistics.median(times_s), 1000 * statistics.quantiles(times_s, n=100)[-1]
