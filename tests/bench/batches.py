"""Batches on modelled replicas: alone on a fleet, and beside interactive requests.

python -m tests.bench.batches --trace conversation_trace.jsonl --seeds 3
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from kvroute.replay.simulate import ENGINE, Cluster, Outcome, simulate
from kvroute.replay.workload.trace import (
    Request,
    at_speed,
    ideal_hit_tokens,
    native_rps,
    read,
)
from tests.bench.batch_lines import BATCHES, documents, in_order, requests, unshared
from tests.bench.report import Row, Section

BLOCK_TOKENS = 64  # of the batches that run alone; beside a trace, the trace's block size
OPEN = 500  # requests that the sender of a batch keeps open
PLAIN_OPEN = (500, 1000)  # the same for plain requests, of which the best is compared
FLEETS = tuple((replicas, kv) for replicas in (4, 16) for kv in (50_000, 200_000))
BESIDE_BATCHES = ("documents", "unshared")
RATES = (3.0, 3.6)  # interactive requests per second: prefill is 53% and 62% busy
SPAN_S, WARM_S, END_S = 900.0, 30.0, 20.0  # the first and the last seconds are not measured
BESIDE = Cluster(replicas=4, kv_tokens=500_000)


def alone(replicas: int, kv_tokens: int, batch: str, seed: int = 0) -> list[Row]:
    """Return how long a batch takes on a fleet without other requests, by rule."""
    lines = requests(in_order(BATCHES[batch](seed)), block_tokens=BLOCK_TOKENS)
    cluster = Cluster(replicas, kv_tokens)
    prompt_tokens = sum(line.input_tokens for line in lines)
    ideal_tokens = prompt_tokens - sum(ideal_hit_tokens(lines))
    plain = [replace(line, is_batch=False) for line in lines]
    outcomes = {
        "plain requests": min(
            (_run_alone(plain, cluster, open_requests) for open_requests in PLAIN_OPEN),
            key=lambda outcome: max(outcome.finished_s),
        ),
        "lane": _run_alone(lines, cluster, OPEN),
    }
    plain_s = max(outcomes["plain requests"].finished_s)
    return [
        {
            "batch": batch,
            "replicas": replicas,
            "KV tokens": kv_tokens,
            "seed": seed,
            "rule": rule,
            "seconds": (seconds := max(outcome.finished_s)),
            "speed, relative to plain requests": plain_s / seconds,
            "computed over ideal tokens": (prompt_tokens - sum(outcome.hit_tokens)) / ideal_tokens,
        }
        for rule, outcome in outcomes.items()
    ]


def _run_alone(lines: Sequence[Request], cluster: Cluster, open_requests: int) -> Outcome:
    queued = range(min(open_requests, len(lines)), len(lines))
    return simulate(lines, cluster, "kvroute", queued=queued)


def beside(trace: Path, rate: float, batch: str, seed: int = 0) -> list[Row]:
    """Return the first tokens of interactive requests, and the work of a batch beside them."""
    recorded = read(trace, limit=None, seed=seed)
    chats = [
        chat for chat in at_speed(recorded, rate / native_rps(recorded)) if chat.arrival_s < SPAN_S
    ]
    lines = {
        "documents": lambda: documents(seed, documents=1500),
        "unshared": lambda: unshared(seed, count=24_000),
    }[batch]()
    made = requests(in_order(lines), block_tokens=chats[0].block_tokens, first=len(chats))
    rows = [{"rule": "no batch", **_beside(chats, [])}]
    rows += [{"rule": "lane", **_beside(chats, made)}]
    common: Row = {"requests/s": rate, "batch": batch, "seed": seed}
    return [{**common, **row} for row in rows]


def _beside(chats: Sequence[Request], lines: Sequence[Request]) -> Row:
    everything, first = [*chats, *lines], len(chats)
    queued = range(first + OPEN, len(everything))
    outcome = simulate(everything, BESIDE, "kvroute", queued=queued, until_s=SPAN_S)
    measured = [chat for chat in chats if WARM_S <= chat.arrival_s < SPAN_S - END_S]
    waits_s = sorted(
        (outcome.first_token_s[chat.index] or SPAN_S) - chat.arrival_s for chat in measured
    )
    hits = sum(outcome.hit_tokens[chat.index] for chat in measured)
    costs_s = _costs_s(lines)
    done = [line for line in lines if outcome.finished_s[line.index] >= WARM_S]
    work_s = sum(costs_s[line.index] for line in done)
    return {
        "p50 TTFT s": waits_s[len(waits_s) // 2],
        "p90 TTFT s": waits_s[int(0.9 * len(waits_s))],
        "p99 TTFT s": waits_s[int(0.99 * len(waits_s))],
        "hit share": hits / sum(chat.input_tokens for chat in measured),
        "batch work": work_s / BESIDE.replicas / (SPAN_S - WARM_S) if lines else None,
        "lines": len(done),
    }


def _costs_s(lines: Sequence[Request]) -> dict[int, float]:
    """Return the seconds of a replica that each line takes if it shares all with the line before.

    A decode step is divided among 128 sequences.
    """
    costs_s, before = dict[int, float](), tuple[int, ...]()
    for line in lines:
        shared = 0
        for one, other in zip(line.reusable, before, strict=False):
            if one != other:
                break
            shared += 1
        prefill_s = ENGINE.prefill.seconds(shared * line.block_tokens, line.input_tokens)
        token_s = ENGINE.step_s / 128 + ENGINE.sequence_s
        token_s += line.input_tokens * ENGINE.context_token_s
        costs_s[line.index] = prefill_s + line.output_tokens * token_s
        before = line.blocks
    return costs_s


def tables(trace: Path | None, seeds: Iterable[int]) -> Iterator[Section]:
    """Yield a table for each fleet on which batches run alone, and for each rate of the trace."""
    for replicas, kv in FLEETS:
        rows = [r for seed in seeds for batch in BATCHES for r in alone(replicas, kv, batch, seed)]
        yield Section(f"Batches alone on {replicas} modelled replicas of {kv:,} tokens", rows)
    if trace is None:
        return
    for rate in RATES:
        rows = [
            r
            for seed in seeds
            for batch in BESIDE_BATCHES
            for r in beside(trace, rate, batch, seed)
        ]
        yield Section(
            f"Batches beside {rate}/s of {trace.name} on {BESIDE.replicas} replicas", rows
        )


def main(
    trace: Annotated[
        Path | None, typer.Option(envvar="KVROUTE_BENCH_TRACE", help="A trace to run beside.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Number of repetitions with other batches.")] = 1,
    first_seed: Annotated[int, typer.Option(help="Seed of the first repetition.")] = 0,
) -> None:
    """Print the tables, each when it is complete."""
    for section in tables(trace, range(first_seed, first_seed + seeds)):
        typer.echo(section.markdown() + "\n")


if __name__ == "__main__":
    typer.run(main)
