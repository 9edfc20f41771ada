"""How many replicas there should be, by how long a newcomer would wait: Serve's autoscaling policy.

The fleet grows on the waiting that is measured, and shrinks on the waiting that one replica fewer
would cause. Serve asks ten times a second, waits until the answer has been the same way for a
while, and keeps it between --replicas and --max-replicas. It ships this module by value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingContext

SAMPLE_S = 2.0  # between two of a replica's reports
LOOK_BACK_S = 60.0  # that they are kept
WAIT_SAMPLES = 5  # of the last ten seconds: growing cannot wait for a minute's mean
MOST_GROWTH = 2.0  # times the replicas that run
ROOMY = 0.6  # how much of each replica may be taken after one has left
CALM = 0.5  # the share of the target that newcomers may wait then


@dataclass(frozen=True, slots=True)
class Report:
    """One replica's last seconds, in means."""

    wait_s: float  # that a newcomer would have waited there
    service_s: float  # that a request keeps others waiting
    occupancy: float  # how much of it was taken: 0 to 1


def desired_replicas(
    reports: Sequence[Report], *, running: int, target: int, target_wait_s: float, has_queue: bool
) -> int:
    """What the target should be. reports: of those that run, as far as they have come.

    A newcomer goes where the backlog is short, so the lower quartile's is what it waits for: an old
    replica's queue, which cannot move, calls for no more replicas once there are empty ones.
    """
    waits_s = sorted([report.wait_s for report in reports] + [0.0] * (running - len(reports)))
    wait_s = waits_s[(running - 1) // 4] if waits_s else 0.0
    if wait_s > target_wait_s or has_queue:
        growth = min(MOST_GROWTH, wait_s / target_wait_s)
        return max(target, running + 1, math.ceil(running * growth))
    is_known = len(reports) == running
    if is_known and target > 1 and would_do(reports, target - 1, target_wait_s):
        return target - 1
    return target


def would_do(reports: Sequence[Report], replicas: int, target_wait_s: float) -> bool:
    """Whether so many can take the load with room to spare."""
    share = sum(report.occupancy for report in reports) / replicas
    if share >= ROOMY or not reports:
        return False
    service_s = fmean(report.service_s for report in reports)
    return queueing_s(replicas, share, service_s) < CALM * target_wait_s


def queueing_s(servers: int, share: float, service_s: float) -> float:
    """A newcomer's mean wait where so many servers are busy for that share of the time.

    Sakasegawa's approximation for M/M/n: "An approximation formula L = a b^p / (1 - b)", 1977.
    """
    power = math.sqrt(2.0 * (servers + 1)) - 1.0
    return service_s * math.pow(share, power) / (servers * (1.0 - share))


class WaitPolicy:
    """The above as Serve calls it."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        target = desired_replicas(
            _reports(ctx.raw_metrics or {}),
            running=ctx.current_num_replicas,
            target=ctx.target_num_replicas,
            target_wait_s=self._target_wait_s,
            has_queue=_has_queue(ctx),
        )
        return target, {}


def _reports(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[Report]:
    """metrics: name -> replica -> samples, oldest first; of those that have sent any."""

    def mean(name: str, replica: Any, samples: int = 0) -> float:
        return fmean(sample.value for sample in metrics[name][replica][-samples:])

    return [
        Report(
            wait_s=mean("wait_s", replica, WAIT_SAMPLES),
            service_s=mean("service_s", replica, WAIT_SAMPLES),
            occupancy=mean("occupancy", replica),
        )
        for replica, samples in metrics.get("wait_s", {}).items()
        if samples
    ]


def _has_queue(ctx: AutoscalingContext) -> bool:
    """Requests wait in the routers since every replica has refused them: for a minute, more than
    one for each. What waited before the last growth proves nothing about now."""
    grown_s: float = ctx.current_time - (ctx.last_scale_up_time or 0.0)
    queued: float = ctx.total_queued_requests
    return grown_s > LOOK_BACK_S and queued > ctx.current_num_replicas
