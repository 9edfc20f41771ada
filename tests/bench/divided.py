"""Limits of an engine's steps and divided fleets, side by side: `python -m tests.bench.divided`.

All fleets are modelled. A divided fleet computes prompts on some of its replicas, and generates the
answers on the others, which pull each prompt's blocks over their links.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from rich.progress import Progress

from kvroute.features.gaps import LIMITS
from kvroute.prefill.speed import PrefillModel
from kvroute.replay.compare import saturation_rps
from kvroute.replay.hardware.engine_model import LINK_GB_PER_S
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.summary import Slo, Summary, summarise
from kvroute.replay.workload.arrivals import arrivals_at
from kvroute.replay.workload.closed_loop import OPEN_LOOP
from kvroute.replay.workload.pace import Pace
from kvroute.replay.workload.trace import Request
from tests.bench.matrix import runs
from tests.bench.matrix.cells import Cell
from tests.bench.matrix.workloads import workload
from tests.bench.report import Row, Section

SLOS = (Slo(2.0, 0.05), Slo(2.0, 0.03), Slo(5.0, 0.03))
TRACES = ("conversation", "agents", "documents", "long answers")
LOADS = (0.5, 0.8, 0.95)
REPLICAS, KV_TOKENS, REQUESTS = 16, 800_000, 2000
LONGER = 4  # answers of the trace "long answers" are this many times as long as conversations'
CHUNKS = (512, 1024, 2048)
TPOT_MS = 30
TTFTS_MS = (500, 1000, 1500, 60_000)
AT_ONCE = PrefillModel(tokens_per_s=1e12, attention_tokens=1e12)  # blocks that were pulled


@dataclass(frozen=True)
class Way:
    """How the fleet computes prompts and answers."""

    name: str
    chunk_tokens: int | None = None  # the most tokens of a step; None: the engine's
    is_placed: bool = False  # whether long prompts go where few answers run
    limits: str = ""  # --slo-tpot-ms and --slo-ttft-ms; empty: none
    for_prompts: int = 0  # replicas that only compute prompts; 0: all replicas do both


WAYS = (
    Way("today"),
    *(Way(f"{tokens} tokens a step", chunk_tokens=tokens) for tokens in CHUNKS),
    Way("placement", is_placed=True),
    *(
        Way(f"{TPOT_MS} ms, first in {ms} ms", is_placed=True, limits=f"{TPOT_MS} {ms}")
        for ms in TTFTS_MS
    ),
    *(
        Way(f"{prompts} for prompts, {REPLICAS - prompts} for answers", for_prompts=prompts)
        for prompts in range(REPLICAS // 2, REPLICAS)
    ),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.divided")
    parser.add_argument("--conversations", type=Path, help="recorded conversations, JSON lines")
    parser.add_argument("--agents", type=Path, help="recorded agents, JSON lines")
    parser.add_argument("--traces", nargs="+", choices=TRACES, default=TRACES)
    parser.add_argument("--loads", nargs="+", type=float, default=LOADS)
    parser.add_argument("--ways", nargs="+", help="the first words of the ways; else all")
    parser.add_argument("--requests", type=int, default=REQUESTS)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    given = {"conversation": options.conversations, "agents": options.agents}
    files = {name: path for name, path in given.items() if path}
    wanted = tuple(options.ways or [""])
    ways = [way for way in WAYS if way.name.startswith(wanted)]
    with ProcessPoolExecutor() as pool:
        for trace in options.traces:
            cell = cell_of(trace, options.requests)
            full_rps = saturation(trace, cell, files)
            for load in options.loads:
                rates = [full_rps * load] * len(ways)
                same = ([each] * len(ways) for each in (cell, trace, files, options.seed))
                summaries = pool.map(measured, ways, rates, *same)
                rows = [row(way, of_way) for way, of_way in zip(ways, summaries, strict=True)]
                title = f"{trace}, {load:.0%}, {full_rps * load:.1f} requests/s"
                print(Section(title, rows).markdown(), flush=True)


def cell_of(trace: str, requests: int) -> Cell:
    """Return the cell whose saturation is 100% load."""
    name = "conversation" if trace == "long answers" else trace
    return Cell(
        trace=name,
        engine="h200-8b",
        load=1.0,
        cache=KV_TOKENS,
        replicas=REPLICAS,
        limit=requests,
    )


def requests_of(trace: str, cell: Cell, files: Mapping[str, Path], seed: int) -> list[Request]:
    """Return the requests of a trace, with their original times."""
    recorded = list(workload(cell.trace, files, limit=cell.limit, seed=seed))
    if trace == "long answers":
        return [replace(each, output_tokens=LONGER * each.output_tokens) for each in recorded]
    return recorded


def saturation(trace: str, cell: Cell, files: Mapping[str, Path]) -> float:
    """Return the maximum requests per second of a fleet that is not divided and has no limits."""
    requests = requests_of(trace, cell, files, seed=0)
    with Progress(disable=True) as progress:
        return saturation_rps(requests, runs.cluster(cell, requests), seed=0, progress=progress)


def measured(
    way: Way, rate: float, cell: Cell, trace: str, files: Mapping[str, Path], seed: int
) -> Sequence[Summary]:
    """Replay a trace at this rate; return a summary for each of SLOS."""
    recorded = requests_of(trace, cell, files, seed)
    cluster = runs.cluster(cell, recorded)
    if way.chunk_tokens:
        cluster = replace(cluster, engine=replace(cluster.engine, chunk_tokens=way.chunk_tokens))
    if way.limits:
        cluster = replace(cluster, environment={LIMITS: way.limits})
    pace = Pace(rate=rate, sessions=None, is_closed_loop=False)
    requests = arrivals_at(pace, recorded, cluster.engine, lambda: 0.0).requests
    if way.for_prompts:
        outcome = divided(requests, cluster, way.for_prompts, seed)
    else:
        policy = "kvroute-gaps" if way.is_placed else "kvroute"
        outcome = simulate(requests, cluster, policy, seed=seed)
    return [summarise(way.name, requests, outcome, OPEN_LOOP, slo) for slo in SLOS]


def divided(requests: Sequence[Request], cluster: Cluster, prompts: int, seed: int) -> Outcome:
    """Return what a fleet does of which this many replicas only compute prompts."""
    firsts = [replace(request, output_tokens=1) for request in requests]
    outcome = simulate(firsts, replace(cluster, replicas=prompts), "kvroute", seed=seed)
    rest = list(answers(requests, cluster, outcome.first_token_s))
    engine = replace(cluster.engine, prefill=AT_ONCE, chunk_tokens=sys.maxsize)
    answering = replace(cluster, replicas=cluster.replicas - prompts, engine=engine)
    answered = simulate([each for _, each in rest], answering, "least-loaded", seed=seed)
    finished_s = [*outcome.first_token_s]
    for (index, _), at_s in zip(rest, answered.finished_s, strict=True):
        finished_s[index] = at_s
    return replace(outcome, finished_s=finished_s, gaps=answered.gaps)


def answers(
    requests: Sequence[Request], cluster: Cluster, first_token_s: Sequence[float]
) -> Iterator[tuple[int, Request]]:
    """Yield the index of each request with a second token, and what another replica does of it.

    That replica gets its blocks when the link has brought them, with no other pulls beside.
    """
    arrivals = []
    for request in requests:
        if request.output_tokens > 1:
            pull_s = request.input_tokens * cluster.kv_bytes / (1e9 * LINK_GB_PER_S)
            at_s = first_token_s[request.index] + cluster.link_latency_s + pull_s
            arrivals.append((at_s, request.index, request))
    for number, (at_s, index, request) in enumerate(sorted(arrivals, key=lambda each: each[:2])):
        left = replace(
            request, index=number, arrival_s=at_s, output_tokens=request.output_tokens - 1
        )
        yield index, left


def row(way: Way, summaries: Sequence[Summary]) -> Row:
    """Return a row of the table."""
    first = summaries[0]
    goodputs: Row = {
        f"goodput ({slo.ttft_s:.0f} s, {1000 * slo.tpot_s:.0f} ms)": summary.goodput
        for slo, summary in zip(SLOS, summaries, strict=True)
    }
    return {
        "way": way.name,
        **goodputs,
        "first token p50, s": first.ttft_p50_s,
        "p90": first.ttft_p90_s,
        "p99": first.ttft_p99_s,
        "gap p50, ms": first.itl_p50_ms,
        "p90, ms": first.itl_p90_ms,
        "p99, ms": first.itl_p99_ms,
        "requests/s": first.throughput_rps,
    }


if __name__ == "__main__":
    main()
