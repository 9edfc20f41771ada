"""The options of `kvroute replay`. Each class has the options of one topic."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar

import typer

from kvroute.command.option_classes import BASIC
from kvroute.replay.hardware.model_config import load_model
from kvroute.replay.hardware.profiles import (
    DEFAULT_ENGINE,
    GPUS,
    PROFILES,
    Profile,
    ProfileError,
    derived,
    load_profile,
)
from kvroute.replay.policies.names import POLICY_NAMES
from kvroute.replay.workload.pace import Pace
from kvroute.replay.workload.published_shapes import SHAPES

if TYPE_CHECKING:
    from kvroute.replay.summary import Slo
    from kvroute.replay.workload.session_ends import Ends

MAX_REPLICAS = 10_000
SHAPE_REQUESTS = 2_000  # number of requests of a --shape
MAX_PACE = 1e6  # highest --load, --speed and --rate


@dataclass(frozen=True)
class Defaults:
    """The values of some options that are not set."""

    policies: str
    replicas: int
    kv_tokens: int | None = None  # KV cache of each replica; None: the profile's
    load: float | None = 0.8  # share of saturation; None: the pace of the trace


TRACE = Defaults("kvroute", replicas=16)
EXAMPLE = Defaults("kvroute,llm-d,round-robin", replicas=4, kv_tokens=60_000)
# The policies for a request log; the log itself gives the other defaults.
LOG_POLICIES = EXAMPLE.policies


@dataclass(frozen=True)
class TraceOptions:
    """The trace."""

    topic: ClassVar[str] = "Requests"

    trace: Annotated[
        Path | None,
        typer.Argument(
            metavar="TRACE",
            help="File of requests in Mooncake's format (JSON lines), or a folder of request logs.",
        ),
        BASIC,
    ] = None
    shape: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help=f"Instead of a TRACE, the workload of a published benchmark: {', '.join(SHAPES)}. "
            f"--limit sets its number of requests (default: {SHAPE_REQUESTS:,}).",
        ),
        BASIC,
    ] = None
    example: Annotated[
        bool,
        typer.Option(
            "--example",
            help="Replay a small trace that comes with kvroute: chats with shared system prompts, "
            f"on {EXAMPLE.replicas} replicas, under the policies {EXAMPLE.policies}.",
        ),
        BASIC,
    ] = False


@dataclass(frozen=True)
class ModelledReplicas:
    """The modelled replicas and their caches."""

    topic: ClassVar[str] = "Replicas and caches"

    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MAX_REPLICAS,
            help=f"Number of modelled replicas (default: {TRACE.replicas}, or the request log's).",
        ),
        BASIC,
    ] = None
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|FILE",
            help=f"Profile of each engine: {', '.join(PROFILES)}; or a JSON file with your own "
            f"numbers, or the report of `make gpu-check`; or with --model-config a GPU: "
            f"{', '.join(GPUS)} (default: {DEFAULT_ENGINE}, or one that fits the times in the "
            "request log).",
        ),
        BASIC,
    ] = None
    model_config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The config.json of your model, or its folder: derives the profile for the GPU of "
            "--engine.",
        ),
    ] = None
    gpus: Annotated[
        int, typer.Option(min=1, help="With --model-config: number of GPUs of each engine.")
    ] = 1
    kv_tokens: Annotated[
        int | None,
        typer.Option(
            min=512,
            help="KV cache of each replica, in tokens (default: the profile's, or the request "
            "log's).",
        ),
        BASIC,
    ] = None
    host_tokens: Annotated[
        int,
        typer.Option(min=0, help="Host memory for the cache of each replica, in tokens."),
        BASIC,
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
                "--disk-tokens needs --host-tokens, since blocks from disk are read into host "
                "memory"
            )
        if self.gpus > 1 and self.model_config is None:
            raise typer.BadParameter(
                f"--gpus {self.gpus} needs --model-config; profiles have a number of GPUs already"
            )
        if self.engine in GPUS and self.model_config is None:
            raise typer.BadParameter(
                f"--engine {self.engine} is a GPU; set --model-config to the config.json of your "
                f"model, or --engine to a profile: {', '.join(PROFILES)}"
            )
        if self.model_config is not None and self.engine not in GPUS:
            raise typer.BadParameter(
                f"with --model-config, --engine is {self.engine!r}; expected a GPU: "
                f"{', '.join(GPUS)}"
            )
        try:
            if self.model_config is not None and self.engine is not None:
                return derived(GPUS[self.engine], load_model(self.model_config), gpus=self.gpus)
            return load_profile(self.engine or DEFAULT_ENGINE)
        except ProfileError as error:
            raise typer.BadParameter(str(error)) from None


@dataclass(frozen=True)
class ArrivalOptions:
    """When requests arrive."""

    topic: ClassVar[str] = "Pace"

    load: Annotated[
        float | None,
        typer.Option(
            min=0.01,
            help="Rate of arrivals as a share of saturation. Saturation is the rate at which the "
            f"best policy serves prompt tokens under overload (default: {TRACE.load}, or the pace "
            "of the request log).",
        ),
        BASIC,
    ] = None
    speed: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Instead of --load: arrivals this many times as fast as in the trace.",
        ),
        BASIC,
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
        BASIC,
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
        """Return the pace, which is as recorded if no option is set.

        Raises BadParameter if the options contradict each other.
        """
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
        return Pace(self.load, self.speed, self.rate, self.sessions, self.closed_loop)


@dataclass(frozen=True)
class RoutingOptions:
    """The policies, and what routers know about the replicas."""

    topic: ClassVar[str] = "Routing"

    policy: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Policies to compare, separated by commas: {', '.join(POLICY_NAMES)}; or all "
            f"(default: {TRACE.policies}; for a request log {LOG_POLICIES}).",
        ),
        BASIC,
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
        """Return the policies to compare. Raises BadParameter for an unknown one.

        Args:
            default: The policies if --policy is not set, separated by commas.
        """
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

    topic: ClassVar[str] = "Requests"

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
        from kvroute.replay.workload.session_ends import Ends

        if self.session_ends is None:
            return None
        shares = _numbers(self.session_ends)
        if len(shares) in (1, 2) and all(0 <= share <= 1 for share in shares):
            return Ends(*shares)
        raise typer.BadParameter(
            f"--session-ends is {self.session_ends!r}; expected SHARE or SHARE:WRONG from 0 to 1, "
            "such as 0.5:0.1"
        )


# The fields of the last base class come first in --help.
@dataclass(frozen=True)
class ReplayOptions(RequestOptions, RoutingOptions, ArrivalOptions, ModelledReplicas, TraceOptions):
    """All options of `kvroute replay`."""

    topic: ClassVar[str] = "Run and output"

    jobs: Annotated[
        int, typer.Option(min=1, help="Number of policies that run in parallel processes.")
    ] = 1
    slo: Annotated[
        str | None,
        typer.Option(
            metavar="ttft=S,tpot=S",
            help="Limits of the time to the first token, and of an answer's mean time between "
            "tokens, such as ttft=2,tpot=0.05: shows the share of the requests within both.",
        ),
        BASIC,
    ] = None
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a list of objects instead of a table."), BASIC
    ] = False

    def check(self) -> None:
        """Raise BadParameter if the options contradict each other, or a value is wrong."""
        self.pace()
        self.profile()
        self.policies(TRACE.policies)
        self.slow_replicas()
        self.ends()
        self.limits()

    def limits(self) -> "Slo | None":
        """Parse --slo."""
        from kvroute.replay.summary import Slo

        if self.slo is None:
            return None
        parts = dict(part.partition("=")[::2] for part in self.slo.split(","))
        limits = {f"{name.strip()}_s": _numbers(value) for name, value in parts.items()}
        if limits.keys() <= {*Slo._fields} and all(
            len(value) == 1 and value[0] > 0 for value in limits.values()
        ):
            return Slo(**{name: value for name, (value,) in limits.items()})
        raise typer.BadParameter(
            f"--slo is {self.slo!r}; expected limits in seconds, such as ttft=2,tpot=0.05"
        )


def _numbers(text: str) -> list[float]:
    """Return the numbers between the colons, or an empty list if a part is not a number."""
    try:
        return [*map(float, text.split(":"))]
    except ValueError:
        return []
