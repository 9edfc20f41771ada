"""The command `kvroute replay`."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from kvroute.client import fail
from kvroute.command.replay_options import (
    EXAMPLE,
    LOG_POLICIES,
    SHAPE_REQUESTS,
    TRACE,
    Defaults,
    ReplayOptions,
)
from kvroute.command.tables import Column, number, print_sentence, print_table
from kvroute.replay.hardware.profiles import DEFAULT_ENGINE, Profile

if TYPE_CHECKING:
    from rich.console import Console

    from kvroute.replay.compare import PolicyRun
    from kvroute.replay.own_log import LoggedFleet
    from kvroute.replay.simulate import Cluster
    from kvroute.replay.summary import Summary
    from kvroute.replay.workload.trace import Request

# The trace of --example, which tests/support/traces.py writes.
EXAMPLE_TRACE = Path(str(files("kvroute.replay"))) / "example.jsonl"
MAX_TIMES_MORE = 1000  # a number of requests this many times as large is not given exactly


def replay(options: ReplayOptions) -> None:
    """Replay a trace on modelled replicas and compare routing policies."""
    from rich.console import Console

    from kvroute.replay.workload.trace import TraceError

    if [options.trace is not None, options.shape is not None, options.example].count(True) != 1:
        raise typer.BadParameter("set one of TRACE, --shape and --example")
    options.check()
    notes = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _compare(options, _requests(options, notes), notes)
    except OSError as error:
        fail(f"TRACE is {str(options.trace)!r}, which cannot be read ({error.strerror})")
    except TraceError as error:
        fail(str(error))


def _requests(options: ReplayOptions, notes: "Console") -> "list[Request]":
    """Read the trace."""
    from kvroute.replay.workload.published_shapes import shaped
    from kvroute.replay.workload.session_ends import with_ends
    from kvroute.replay.workload.trace import read, unnamed

    if options.shape is not None:
        recorded = shaped(options.shape, options.limit or SHAPE_REQUESTS, options.seed)
    else:
        recorded = read(
            options.trace or EXAMPLE_TRACE,
            limit=options.limit,
            seed=options.seed,
            model=options.model,
        )
    if note := unnamed(recorded):
        notes.print(note)
    ends = options.ends()
    return recorded if ends is None else with_ends(recorded, ends, options.seed)


def _compare(options: ReplayOptions, recorded: "list[Request]", notes: "Console") -> None:
    """Replay the requests under each policy, and print the results."""
    from rich.progress import Progress

    from kvroute.replay.compare import compare, saturation_rps
    from kvroute.replay.own_log import logged_fleet, measured_summary
    from kvroute.replay.workload.arrivals import arrivals_at

    profile = options.profile()
    fleet = logged_fleet(recorded, profile.engine())
    defaults = _defaults(options, fleet)
    cluster = _cluster(options, profile, defaults, fleet)
    pace = options.pace()
    if pace.is_as_recorded and not pace.is_closed_loop:
        pace = replace(pace, load=defaults.load)
    if fleet is not None:
        for sentence in _of_log(options, fleet):
            print_sentence(sentence, err=options.as_json)
    with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
        saturation = partial(
            saturation_rps,
            recorded,
            cluster,
            seed=options.seed,
            progress=progress,
            jobs=options.jobs,
        )
        arrivals = arrivals_at(pace, recorded, cluster.engine, saturation)
        modelled = (
            f"{_described(cluster, _engine_name(options, fleet))}; {len(recorded):,} requests"
        )
        print_sentence(f"{modelled}, {arrivals.summary}", err=options.as_json)
        runs = compare(
            options.policies(defaults.policies),
            arrivals.requests,
            cluster,
            seed=options.seed,
            progress=progress,
            loop=arrivals.loop,
            slo=options.limits(),
            jobs=options.jobs,
        )
    measured = None if fleet is None else measured_summary(recorded, cluster.engine)
    summaries = [*filter(None, [measured]), *(run.summary for run in runs)]
    if options.as_json:
        typer.echo(json.dumps([summary.row() for summary in summaries], indent=2))
    else:
        _show(arrivals.requests, runs, summaries)


def _defaults(options: ReplayOptions, fleet: "LoggedFleet | None") -> Defaults:
    """Return the values of options that are not set."""
    if fleet is None:
        return EXAMPLE if options.example else TRACE
    return Defaults(LOG_POLICIES, fleet.replicas, fleet.kv_tokens, load=None)


def _engine_name(options: ReplayOptions, fleet: "LoggedFleet | None") -> str:
    """Return the name of the engine for the terminal."""
    if options.engine is None and fleet is not None and fleet.engine is not None:
        return "fitted engine"
    return options.engine or DEFAULT_ENGINE


def _cluster(
    options: ReplayOptions, profile: Profile, defaults: Defaults, fleet: "LoggedFleet | None"
) -> "Cluster":
    """Return the modelled cluster."""
    from kvroute.replay.simulate import Cluster

    engine = fleet.engine if fleet is not None and options.engine is None else None
    link_gb_per_s, latency_ms = options.link_gb_per_s, options.link_latency_ms
    return Cluster(
        options.replicas or defaults.replicas,
        options.kv_tokens or defaults.kv_tokens or profile.kv_tokens,
        options.routers,
        options.index_delay_ms / 1000,
        options.share_delay_ms / 1000,
        engine or profile.engine(),
        *options.slow_replicas(),
        host_tokens=options.host_tokens,
        host_gb_per_s=options.host_gb_per_s or profile.host_gb_per_s,
        disk_tokens=options.disk_tokens,
        disk_gb_per_s=options.disk_gb_per_s or profile.disk_gb_per_s,
        kv_bytes=profile.kv_bytes,
        link_gb_per_s=profile.link_gb_per_s if link_gb_per_s is None else link_gb_per_s,
        link_latency_s=profile.link_latency_s if latency_ms is None else latency_ms / 1000,
    )


def _of_log(options: ReplayOptions, fleet: "LoggedFleet") -> Iterator[str]:
    """Yield what the replay has taken from a request log, and what the log does not have."""
    from kvroute.replay.own_log import speed_of

    taken = []
    if options.pace().is_as_recorded:
        taken.append("its pace")
    if options.replicas is None:
        taken.append(f"{fleet.replicas} replicas")
    if options.kv_tokens is None and fleet.kv_tokens is not None:
        taken.append(f"{fleet.kv_tokens:,} tokens of KV cache each")
    if options.engine is None and fleet.engine is not None:
        taken.append(f"an engine that fits the measured times ({speed_of(fleet.engine)})")
    if taken:
        yield f"From the request log: {', '.join(taken)}."
    for missing in fleet.missing():
        if not getattr(options, missing.option):
            yield f"NOTE: {missing.sentence} (--{missing.option.replace('_', '-')})."


def _described(cluster: "Cluster", engine: str) -> str:
    """Return a text that describes the modelled cluster."""
    parts = [f"{cluster.replicas} x {engine}, {cluster.kv_tokens:,} tokens of KV cache each"]
    if cluster.host_tokens:
        parts.append(f"{cluster.host_tokens:,} tokens of host memory each")
    if cluster.disk_tokens:
        parts.append(f"{cluster.disk_tokens:,} tokens of disk cache each")
    if cluster.routers > 1:
        parts.append(f"{cluster.routers} routers")
    if cluster.slow_share:
        slow = f"{cluster.slow_share:.0%} of the replicas at {cluster.slow_speed:.0%} of the speed"
        parts.append(slow)
    return ", ".join(parts)


def _show(
    requests: "Sequence[Request]", runs: "Sequence[PolicyRun]", summaries: "Sequence[Summary]"
) -> None:
    """Print the tables, and explain the marks in them."""
    from kvroute.replay.noise import sample, ties
    from kvroute.replay.summary import BEST, MEASURED, measured_part, tables, ties_shown

    measured = measured_part(requests)
    samples = {run.summary.policy: sample(requests, run.outcome, measured) for run in runs}
    tied = ties(samples)
    for table in tables(summaries, tied):
        typer.echo()
        first, *others = table.headings
        print_table([Column(first), *map(number, others)], table.rows)
    typer.echo()
    if len(summaries) > len(runs):
        print_sentence(
            f"{MEASURED} is what your cluster has measured; all other rows are modelled."
        )
    if len(runs) > 1:
        print_sentence(f"{BEST} is the best value.")
        shown = ties_shown(summaries, tied)
        for warning in _too_few(len(requests), len(requests[measured]), shown):
            print_sentence(f"WARNING: {warning}")


def _too_few(count: int, measured: int, shown: "dict[str, float]") -> Iterator[str]:
    """Yield a warning if there are too few requests to tell the policies apart.

    Args:
        count: Number of requests.
        measured: Number of requests after those that only fill the caches.
        shown: The result of report.ties_shown.
    """
    from kvroute.replay.noise import BLOCKS, is_enough
    from kvroute.replay.summary import BEST, NOISE, WARM_UP

    if not is_enough(measured):
        least = -(-BLOCKS * WARM_UP // (WARM_UP - 1))
        yield (
            f"{count} requests are too few to compare policies; with fewer than {least}, the "
            "command cannot tell a difference from noise."
        )
        return
    enough = [f"{_enough(count, times)} for {name}" for name, times in shown.items()]
    if enough:
        yield (
            f"the difference between {NOISE} and {BEST} is within noise. If the differences stay "
            f"as they are, the number of requests that would show them is {', '.join(enough)}; "
            f"this trace has {count:,}. The mean over several --seed would show them, too."
        )


def _enough(count: int, times_more: float) -> str:
    """Return how many requests would be enough, rounded up to two digits."""
    if times_more > MAX_TIMES_MORE:
        return f"more than {MAX_TIMES_MORE * count:,}"
    number = int(count * times_more) + 1
    unit = 10 ** max(0, len(str(number)) - 2)
    return f"about {-(-number // unit) * unit:,}"
