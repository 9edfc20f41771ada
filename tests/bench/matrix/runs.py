"""Runs a cell of the policy benchmark with one policy and one seed."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from rich.progress import Progress

from kvroute.replay.compare import saturation_rps
from kvroute.replay.hardware.engine_model import EngineModel
from kvroute.replay.hardware.profiles import DEFAULT_ENGINE, PROFILES
from kvroute.replay.simulate import Cluster, simulate
from kvroute.replay.steps import blocks_needed
from kvroute.replay.summary import Slo, summarise
from kvroute.replay.workload.arrivals import arrivals_at
from kvroute.replay.workload.closed_loop import OPEN_LOOP
from kvroute.replay.workload.pace import Pace
from kvroute.replay.workload.trace import Request
from tests.bench.matrix.cells import CACHES, SLOW_SHARE, SLOW_SPEED, Cell
from tests.bench.matrix.workloads import Files, workload

DEFAULT = PROFILES[DEFAULT_ENGINE].engine()
SLO = Slo(ttft_s=2.0, tpot_s=0.05)


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one policy in a cell, with one seed."""

    cell: str
    policy: str
    seed: int
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p99_s: float
    hit_share: float
    throughput_rps: float
    goodput: float  # share of the requests within the limits of limits()
    # The next four are None unless the cell has a fixed number of sessions.
    turns_per_min: float | None
    slowdown_p50: float | None
    slowdown_p90: float | None
    slowdown_p99: float | None

    def row(self) -> dict[str, str | int | float | None]:
        return asdict(self)


def saturation(cell: Cell, files: Files) -> float:
    """Return the maximum requests per second of the cell's replicas at full speed."""
    requests = list(workload(cell.trace, files, limit=cell.limit, seed=0))
    with Progress(disable=True) as progress:
        return saturation_rps(requests, cluster(cell, requests), seed=0, progress=progress)


def measure(
    cell: Cell, policy: str, seed: int, files: Files, saturations: Mapping[str, float]
) -> Result:
    """Replay the cell's trace with one policy. Equal arguments give equal results.

    `saturations` has the saturations by the name of the cell at saturation.
    """
    recorded = list(workload(cell.trace, files, limit=cell.limit, seed=seed))
    replicas = cluster(cell, recorded)
    rate = _rate(cell, recorded, replicas, saturations) if cell.load else cell.rate
    pace = Pace(rate=rate, sessions=cell.sessions, is_closed_loop=cell.is_closed)
    arrivals = arrivals_at(pace, recorded, replicas.engine, lambda: 0.0)
    loop = arrivals.loop
    outcome = simulate(
        arrivals.requests,
        replicas,
        policy,
        seed=seed,
        follow_ups=loop.follow_ups,
        queued=loop.queued,
    )
    summary = summarise(
        policy,
        arrivals.requests,
        outcome,
        loop if cell.sessions else OPEN_LOOP,
        limits(replicas.engine),
    )
    times = summary.session_times
    return Result(
        str(cell),
        policy,
        seed,
        ttft_p50_s=summary.ttft_p50_s,
        ttft_p90_s=summary.ttft_p90_s,
        ttft_p99_s=summary.ttft_p99_s,
        hit_share=summary.hit_share,
        throughput_rps=summary.throughput_rps,
        goodput=summary.goodput or 0.0,
        turns_per_min=times.turns_per_min,
        slowdown_p50=times.slowdown_p50,
        slowdown_p90=times.slowdown_p90,
        slowdown_p99=times.slowdown_p99,
    )


def limits(engine: EngineModel) -> Slo:
    """Return the times that users accept: SLO on the default engine, in proportion on others."""
    ttft = DEFAULT.prefill.tokens_per_s / engine.prefill.tokens_per_s
    return Slo(SLO.ttft_s * ttft, SLO.tpot_s * engine.step_s / DEFAULT.step_s)


def cluster(cell: Cell, requests: list[Request]) -> Cluster:
    """Return the cell's replicas. Each cache is large enough for any two requests."""
    block_tokens = requests[0].block_tokens
    if isinstance(cell.cache, int):
        kv_tokens = cell.cache
    else:
        distinct = {block for request in requests for block in request.blocks}
        share = CACHES[cell.cache] * len(distinct) / cell.replicas
        longest = max(map(blocks_needed, requests))
        kv_tokens = max(int(share), 2 * longest) * block_tokens
    return Cluster(
        cell.replicas,
        kv_tokens,
        cell.routers,
        engine=PROFILES[cell.engine].engine(),
        slow_share=SLOW_SHARE if cell.is_slow else 0.0,
        slow_speed=SLOW_SPEED if cell.is_slow else 1.0,
    )


def _rate(
    cell: Cell, recorded: list[Request], replicas: Cluster, saturations: Mapping[str, float]
) -> float:
    """Return the rate for the cell's load: requests per second, or session starts per second.

    A closed loop needs the rate of session starts. Slow replicas reduce the fleet's saturation.
    """
    assert cell.load is not None
    health = sum(replicas.speeds) / len(replicas.speeds)
    requests_per_s = cell.load * health * saturations[str(cell.at_saturation)]
    if not cell.is_closed:
        return requests_per_s
    return requests_per_s * len({request.session for request in recorded}) / len(recorded)
