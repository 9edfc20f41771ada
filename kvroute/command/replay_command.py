"""The command `kvroute replay`."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvroute.client import fail
from kvroute.command.tables import Column, number, print_sentence, print_table
from kvroute.replay.hardware.profiles import (
    DEFAULT_ENGINE,
    PROFILES,
    Profile,
    ProfileError,
    load_profile,
)
from kvroute.replay.policies.names import POLICY_NAMES
from kvroute.replay.workload.pace import Pace

if TYPE_CHECKING:
    from rich.console import Console

    from kvroute.replay.compare import PolicyRun
    from kvroute.replay.simulate import Cluster
    from kvroute.replay.workload.sessions import Ends
    from kvroute.replay.workload.trace import Request

DEFAULT_LOAD = 0.8  # share of saturation; see --load
DEFAULT_POLICY = "kvroute"
DEFAULT_REPLICAS = 16
MAX_REPLICAS = 10_000
MAX_PACE = 1e6  # highest --load, --speed and --rate
EXAMPLE = Path(str(files("kvroute.replay"))) / "example.jsonl"  # written by tests/support/traces.py
EXAMPLE_POLICIES = "kvroute,llm-d,round-robin"
EXAMPLE_REPLICAS = 4
EXAMPLE_KV_TOKENS = 60_000  # KV cache of each replica for --example, in tokens


@dataclass(frozen=True)
class TraceOptions:
    """The trace."""

    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="File of requests in Mooncake's format (JSON lines), or a folder of request logs.",
        ),
    ] = None
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Replay a small trace that comes with kvroute: chats with shared system prompts, "
            f"on {EXAMPLE_REPLICAS} replicas, under the policies {EXAMPLE_POLICIES}.",
        ),
    ] = False


@dataclass(frozen=True)
class ReplicaOptions:
    """The modelled replicas and their caches."""

    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_REPLICAS,
            help=f"Number of modelled replicas (default: {DEFAULT_REPLICAS}).",
        ),
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Profile of each engine: {', '.join(PROFILES)}; or a JSON file with your own "
            "numbers.",
        ),
    ] = DEFAULT_ENGINE
    kv_tokens: Annotated[
        int | None,
        typer.Option(min=512, help="KV cache of each replica, in tokens (default: the profile's)."),
    ] = None
    host_tokens: Annotated[
        int, typer.Option(min=0, help="Host memory for the cache of each replica, in tokens.")
    ] = 0
    host_gb_per_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Speed of copies from host memory (default: the profile's)."),
    ] = None
    disk_tokens: Annotated[
        int,
        typer.Option(
            min=0, help="With --host-tokens: disk cache of each replica, in tokens (0: none)."
        ),
    ] = 0
    disk_gb_per_s: Annotated[
        float | None,
        typer.Option(min=0.001, help="Speed of reads of a disk cache (default: the profile's)."),
    ] = None
    link_gb_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.0,
            help="With --host-tokens: bandwidth of each replica's network link, over which "
            "replicas pull blocks from each other (default: the profile's; 0: they do not pull).",
        ),
    ] = None
    link_latency_ms: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Time until the first bytes of a pull (default: the profile's)."
        ),
    ] = None

    def profile(self) -> Profile:
        """Return the profile of each engine. Raises BadParameter if options are wrong."""
        if self.disk_tokens and not self.host_tokens:
            raise typer.BadParameter(
                "--disk-tokens needs --host-tokens, since disks fill host memory"
            )
        try:
            return load_profile(self.engine)
        except ProfileError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests arrive."""

    load: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Rate of arrivals as a share of saturation. Saturation is the rate at which the "
            f"best policy serves prompt tokens under overload (default: {DEFAULT_LOAD}).",
        ),
    ] = None
    speed: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Instead of --load: arrivals this many times as fast as in the trace.",
        ),
    ] = None
    rate: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Instead of --load: requests per second; with --closed-loop, sessions that start "
            "per second.",
        ),
    ] = None
    closed_loop: Annotated[
        bool,
        typer.Option(
            "--closed-loop",
            help="Each turn of a session waits for the previous answer, then pauses as long as in "
            "the trace.",
        ),
    ] = False
    sessions: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="With --closed-loop, instead of --rate or --speed: number of sessions that run "
            "at once. When one ends, the next session of the trace starts.",
        ),
    ] = None

    def pace(self) -> Pace:
        """Return the pace. Raises BadParameter if the options contradict each other."""
        options = {"--load": self.load, "--speed": self.speed, "--rate": self.rate}
        for name, value in options.items():
            if value is not None and value > MAX_PACE:
                raise typer.BadParameter(f"{name} is {value:g}; expected at most {MAX_PACE:,.0f}")
        if sum(value is not None for value in (*options.values(), self.sessions)) > 1:
            raise typer.BadParameter(
                "--load, --speed, --rate and --sessions exclude each other; set one of them"
            )
        if self.sessions is not None and not self.closed_loop:
            raise typer.BadParameter(
                f"--sessions {self.sessions} works only in a closed loop; add --closed-loop"
            )
        if self.closed_loop and self.load is not None:
            raise typer.BadParameter(
                "--load does not work with --closed-loop, where sessions wait for their answers; "
                "set --sessions, --rate or --speed"
            )
        load = self.load
        if self.speed is None and self.rate is None and not self.closed_loop:
            load = load or DEFAULT_LOAD
        return Pace(load, self.speed, self.rate, self.sessions, self.closed_loop)


@dataclass(frozen=True)
class RoutingOptions:
    """The policies, and what routers know about the replicas."""

    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Policies to compare, separated by commas: {', '.join(POLICY_NAMES)}; or all "
            f"(default: {DEFAULT_POLICY}).",
        ),
    ] = None
    routers: Annotated[
        int, typer.Option(min=1, help="Number of routers, each with its own copy of the index.")
    ] = 1
    index_delay_ms: Annotated[
        float, typer.Option(min=0, help="Time from caching a block until routers know it.")
    ] = 10.0
    share_delay_ms: Annotated[
        float,
        typer.Option(
            min=0, help="Time from a decision until other routers know it; inf: they never do."
        ),
    ] = 5.0
    slow: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE:SPEED",
            help="Replicas that are slower than routers expect. 0.5:0.8: half of the replicas run "
            "at 80% of the expected speed.",
        ),
    ] = None

    def policies(self, default: str) -> list[str]:
        """Return the policies to compare. Raises BadParameter for an unknown one."""
        policy = default if self.policy is None else self.policy
        names = [*POLICY_NAMES] if policy == "all" else [name.strip() for name in policy.split(",")]
        unknown = [name for name in names if name not in POLICY_NAMES]
        if unknown:
            choices = ", ".join(POLICY_NAMES)
            raise typer.BadParameter(
                f"--policy names {unknown[0]!r}; expected all or some of {choices}"
            )
        return names

    def slow_replicas(self) -> tuple[float, float]:
        """Parse --slow: the share of slow replicas, and their speed relative to the others."""
        if self.slow is None:
            return 0.0, 1.0
        match _numbers(self.slow):
            case [share, speed] if 0 < share <= 1 and speed > 0:
                return share, speed
        raise typer.BadParameter(f"--slow is {self.slow!r}; expected SHARE:SPEED, such as 0.5:0.8")


@dataclass(frozen=True)
class RequestOptions:
    """Which requests of the trace are replayed, and their hints."""

    session_ends: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE[:WRONG]",
            help="Clients' hints that a session ends, such as 0.5:0.1: half of the last turns have "
            "the hint, and so do, wrongly, 10% of all other turns.",
        ),
    ] = None
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 0
    model: Annotated[
        str | None,
        typer.Option(help="Replay only requests for this model, if the trace has several."),
    ] = None
    limit: Annotated[
        int | None,
        typer.Option(min=2, help="Replay only the first N requests."),
    ] = None

    def ends(self) -> "Ends | None":
        """Parse --session-ends: the shares of right and of wrong hints."""
        from kvroute.replay.workload.sessions import Ends

        if self.session_ends is None:
            return None
        shares = _numbers(self.session_ends)
        if len(shares) in (1, 2) and all(0 <= share <= 1 for share in shares):
            return Ends(*shares)
        raise typer.BadParameter(
            f"--session-ends is {self.session_ends!r}; expected SHARE or SHARE:WRONG from 0 to 1, "
            "such as 0.5:0.1"
        )


# Typer makes an option of each field, and then calls the class with the values. The fields of the
# last base class come first in --help.
@dataclass(frozen=True)
class Replay(RequestOptions, RoutingOptions, ArrivalOptions, ReplicaOptions, TraceOptions):
    """Replay a trace on modelled replicas and compare routing policies."""

    jobs: Annotated[
        int, typer.Option(min=1, help="Number of policies that run in parallel processes.")
    ] = 1
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects instead of a table.")
    ] = False

    def __post_init__(self) -> None:
        """Run the command."""
        from rich.console import Console

        from kvroute.replay.workload.trace import TraceError

        if (self.trace is None) is not self.example:
            raise typer.BadParameter("set either a TRACE or --example")
        pace = self.pace()
        names = self.policies(EXAMPLE_POLICIES if self.example else DEFAULT_POLICY)
        profile = self.profile()
        ends = self.ends()
        cluster = self._cluster(profile)
        notes = Console(stderr=True, highlight=False, soft_wrap=True)
        try:
            self._compare(names, pace, self._requests(ends, notes), cluster, notes)
        except OSError as error:
            fail(f"TRACE is {str(self.trace)!r}, which cannot be read ({error.strerror})")
        except TraceError as error:
            fail(str(error))

    def _cluster(self, profile: Profile) -> "Cluster":
        """Return the modelled cluster. Raises BadParameter if --slow is wrong."""
        from kvroute.replay.simulate import Cluster

        link_gb_per_s, latency_ms = self.link_gb_per_s, self.link_latency_ms
        return Cluster(
            self.replicas or (EXAMPLE_REPLICAS if self.example else DEFAULT_REPLICAS),
            self.kv_tokens or (EXAMPLE_KV_TOKENS if self.example else profile.kv_tokens),
            self.routers,
            self.index_delay_ms / 1000,
            self.share_delay_ms / 1000,
            profile.engine(),
            *self.slow_replicas(),
            host_tokens=self.host_tokens,
            host_gb_per_s=self.host_gb_per_s or profile.host_gb_per_s,
            disk_tokens=self.disk_tokens,
            disk_gb_per_s=self.disk_gb_per_s or profile.disk_gb_per_s,
            kv_bytes=profile.kv_bytes,
            link_gb_per_s=profile.link_gb_per_s if link_gb_per_s is None else link_gb_per_s,
            link_latency_s=profile.link_latency_s if latency_ms is None else latency_ms / 1000,
        )

    def _requests(self, ends: "Ends | None", notes: "Console") -> "list[Request]":
        """Read the trace."""
        from kvroute.replay.workload.sessions import with_ends
        from kvroute.replay.workload.trace import read, unnamed

        trace = self.trace or EXAMPLE
        recorded = read(trace, limit=self.limit, seed=self.seed, model=self.model)
        if note := unnamed(recorded):
            notes.print(note)
        return recorded if ends is None else with_ends(recorded, ends, self.seed)

    def _compare(
        self,
        names: list[str],
        pace: Pace,
        recorded: "list[Request]",
        cluster: "Cluster",
        notes: "Console",
    ) -> None:
        """Replay the requests under each policy, and print the results."""
        from rich.progress import Progress

        from kvroute.replay.compare import compare, saturation_rps
        from kvroute.replay.workload.arrivals import arrivals_at

        with Progress(console=notes, transient=True, disable=not notes.is_terminal) as progress:
            saturation = partial(
                saturation_rps, recorded, cluster, seed=self.seed, progress=progress, jobs=self.jobs
            )
            arrivals = arrivals_at(pace, recorded, cluster.engine, saturation)
            modelled = f"{_described(cluster, self.engine)}; {len(recorded):,} requests"
            print_sentence(f"{modelled}, {arrivals.summary}", err=self.as_json)
            runs = compare(
                names,
                arrivals.requests,
                cluster,
                seed=self.seed,
                progress=progress,
                loop=arrivals.loop,
                jobs=self.jobs,
            )
        if self.as_json:
            typer.echo(json.dumps([run.summary.row() for run in runs], indent=2))
        else:
            _show(arrivals.requests, runs)


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


def _show(requests: "Sequence[Request]", runs: "Sequence[PolicyRun]") -> None:
    """Print the tables, and explain the marks in them."""
    from kvroute.replay.noise import sample, ties
    from kvroute.replay.report import BEST, NOISE, measured_part, tables

    measured = measured_part(requests)
    samples = {run.summary.policy: sample(requests, run.outcome, measured) for run in runs}
    tied = ties(samples)
    for table in tables([run.summary for run in runs], tied):
        typer.echo()
        first, *others = table.headings
        print_table([Column(first), *map(number, others)], table.rows)
    if len(runs) > 1:
        typer.echo()
        print_sentence(f"{BEST} is the best value.")
    if any(tied.values()):
        print_sentence(
            f"WARNING: the difference between {NOISE} and {BEST} is within noise. A longer trace "
            "or the mean over several --seed would show which one is better."
        )


def _numbers(text: str) -> list[float]:
    """Return the numbers between the colons, or an empty list if a part is not a number."""
    try:
        return [*map(float, text.split(":"))]
    except ValueError:
        return []
