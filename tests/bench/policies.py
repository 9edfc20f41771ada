"""Routing policies on recorded and generated traces: `kvroute replay` at four loads."""

import sys
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from kvroute.replay.compare import compare, saturation_rps
from kvroute.replay.policies.production import POLICIES
from kvroute.replay.simulate import Cluster
from kvroute.replay.workload.trace import Request, at_speed, native_rps, read
from tests.bench.report import Row, Section
from tests.support.traces import WORKLOADS

LOADS = (0.5, 0.8, 0.95, 1.3)  # loads as shares of the saturation
CLUSTER = Cluster(
    replicas=16, kv_tokens=800_000, routers=1, index_delay_s=0.01, share_delay_s=0.005
)
SEED = 0
JOBS = 2


def policies(trace: Path) -> Section:
    return _compared(trace.name, read(trace, limit=None, seed=SEED))


def policies_on_generated(workload: str) -> Section:
    return _compared(f"generated {workload}", WORKLOADS[workload](SEED))


def _compared(name: str, recorded: list[Request]) -> Section:
    with Progress(console=Console(file=sys.stderr)) as progress:
        saturation = saturation_rps(recorded, CLUSTER, seed=SEED, progress=progress, jobs=JOBS)
        rows: list[Row] = []
        for load in LOADS:
            requests = at_speed(recorded, load * saturation / native_rps(recorded))
            runs = compare(
                list(POLICIES), requests, CLUSTER, seed=SEED, progress=progress, jobs=JOBS
            )
            rows += [{"load": load, **run.summary.row()} for run in runs]
    title = f"Policies on {name}, {CLUSTER.replicas} replicas, saturated at {saturation:.1f}/s"
    return Section(title, rows)
