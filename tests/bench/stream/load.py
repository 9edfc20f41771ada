"""A load of chats over raw sockets, and the CPU time that it costs other processes."""

import asyncio
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import uvloop

from tests.bench.stream.caller import Caller, Tally

RAMP_S = 1.0  # seconds from the first connection's start to the last one's
SETTLE_S = 1.5  # seconds from the last connection's start to the start of the measurement

Processes = Mapping[str, Sequence[int]]  # role -> process ids


@dataclass(frozen=True, kw_only=True)
class Load:
    model: str
    concurrent: int
    tokens: int  # number of tokens of each answer
    streamed: bool = True
    window_s: float = 5.0


@dataclass(frozen=True)
class Cost:
    """The costs in a time window during a steady load."""

    seconds: float
    tokens: int
    events: int
    answers: int
    ttft_p50_ms: float | None  # None: no answer began in the window
    ttft_p99_ms: float | None
    gap_p50_ms: float | None
    gap_p99_ms: float | None
    cpu_s: Mapping[str, float]  # role -> CPU seconds


def measure(port: int, load: Load, processes: Processes) -> Cost:
    """Send the load to this port of this machine, and return the costs."""
    return uvloop.run(_amid(port, load, processes))


def idle_cpu_s(processes: Processes, *, seconds: float) -> dict[str, float]:
    """Return the CPU seconds per second of each role without any requests."""
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
    """Return the number of tokens of each stream's first answer.

    They differ, so that later answers are distributed evenly in time.
    """
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
    measured = cost(tally, time.perf_counter() - begun_s, spent_s)
    failed.cancel()
    for caller in callers:
        caller.close()
    return measured


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
    """Wait; if something fails meanwhile, raise the error at once."""
    done, _ = await asyncio.wait([failed], timeout=seconds)
    for future in done:
        future.result()


def cpu_so_far(processes: Processes) -> dict[str, float]:
    """Return the CPU seconds of each role so far, from the processes' CPU clocks.

    clock_getcpuclockid(3) describes how the id of a process's clock follows from the process id.
    """
    return {
        role: sum(time.clock_gettime(~pid << 3 | 2) for pid in pids)
        for role, pids in processes.items()
    }


def cpu_since(before: Mapping[str, float], processes: Processes) -> dict[str, float]:
    """Return the CPU seconds of each role since `before`, a result of cpu_so_far()."""
    return {role: after - before[role] for role, after in cpu_so_far(processes).items()}


def _quantiles_ms(times_s: Sequence[float]) -> tuple[float | None, float | None]:
    """Return the median and the 99th percentile in milliseconds."""
    if not times_s:
        return None, None
    if len(times_s) == 1:
        return 1000 * times_s[0], 1000 * times_s[0]
    return 1000 * statistics.median(times_s), 1000 * statistics.quantiles(times_s, n=100)[-1]
