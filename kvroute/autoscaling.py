"""Serve's autoscaling policy keeps the wait of a new request short with few replicas.

The fleet grows when the measured wait is too long. It shrinks when the predicted wait with one
replica fewer is short. Serve calls the policy ten times a second, applies a change when it has been
wanted for a while, and keeps between --replicas and --max-replicas. It ships this module by value.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingContext

SAMPLE_S = 2.0  # between two reports of a replica
LOOK_BACK_S = 60.0  # how long reports are kept
WAIT_SAMPLES = 5  # the last ten seconds: to grow, a minute's mean would be too late
LARGER = 1.25  # the cache of Report.missed, as a multiple of the real one
MOST_GROWTH = 2.0  # the largest factor in one step
ROOMY = 0.6  # the highest occupancy allowed after one replica is removed
TARGET_SHARE = 0.5  # the longest predicted wait allowed then, as a share of the target


@dataclass(frozen=True, slots=True)
class Report:
    """Means over one replica's recent samples."""

    wait_s: float  # wait of a new request on this replica
    service_s: float  # time that one request delays the others
    occupancy: float  # 0 to 1
    refusing: float = 0.0  # share of the samples in which it refused requests, for want of room
    missed: float = 0.0  # share of the computed tokens that a LARGER cache would have had


def desired_replicas(
    reports: Sequence[Report], *, running: int, target: int, target_wait_s: float, has_queue: bool
) -> int:
    """The new target. reports: from running replicas, as far as they have arrived.

    A new request goes where the backlog is short, so its wait is the lower quartile. Queued
    requests do not move: a long queue on an old replica needs no more replicas once there are
    empty ones.
    """
    waits_s = sorted([report.wait_s for report in reports] + [0.0] * (running - len(reports)))
    wait_s = waits_s[(running - 1) // 4] if waits_s else 0.0
    if wait_s > target_wait_s or has_queue:
        growth = min(MOST_GROWTH, wait_s / target_wait_s)
        return max(target, running + 1, math.ceil(running * growth))
    is_known = len(reports) == running
    if is_known and target > 1 and is_enough(reports, target - 1, target_wait_s):
        return target - 1
    return target


def is_enough(reports: Sequence[Report], replicas: int, target_wait_s: float) -> bool:
    """Whether this many replicas can take the load with a reserve. They are one fewer than now."""
    if not reports:
        return False
    more_work = 1.0 + fmean(report.missed for report in reports) * cache_loss(replicas)
    share = more_work * sum(report.occupancy for report in reports) / replicas
    if share >= ROOMY:
        return False
    service_s = fmean(report.service_s for report in reports)
    return queueing_s(replicas, share, service_s) < TARGET_SHARE * target_wait_s


def cache_loss(replicas: int) -> float:
    """What the fleet's cache loses with one replica, in steps of LARGER. Hits grow about evenly
    with the logarithm of a cache's size, so each step loses about what a step more would bring."""
    return math.log1p(1.0 / replicas) / math.log(LARGER)


def queueing_s(servers: int, share: float, service_s: float) -> float:
    """The mean wait of a new request when each of the servers is busy for `share` of the time.

    Sakasegawa's approximation for M/M/n: "An approximation formula L = a b^p / (1 - b)", 1977.
    """
    power = math.sqrt(2.0 * (servers + 1)) - 1.0
    return service_s * math.pow(share, power) / (servers * (1.0 - share))


class WaitPolicy:
    """desired_replicas() behind Serve's interface."""

    def __init__(self, target_wait_s: float) -> None:
        self._target_wait_s = target_wait_s

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        reports = _reports(ctx.raw_metrics or {})
        target = desired_replicas(
            reports,
            running=ctx.current_num_replicas,
            target=ctx.target_num_replicas,
            target_wait_s=self._target_wait_s,
            has_queue=_has_queue(ctx, reports),
        )
        return target, {}


def _reports(metrics: Mapping[str, Mapping[Any, Sequence[Any]]]) -> list[Report]:
    """One report per replica with samples. metrics: name -> replica -> samples, oldest first."""

    def mean(name: str, replica: Any, samples: int = 0) -> float:
        found = metrics.get(name, {}).get(replica, ())  # an older replica tells less
        return fmean(sample.value for sample in found[-samples:]) if found else 0.0

    return [
        Report(
            wait_s=mean("wait_s", replica, WAIT_SAMPLES),
            service_s=mean("service_s", replica, WAIT_SAMPLES),
            occupancy=mean("occupancy", replica),
            refusing=mean("refusing", replica),
            missed=mean("missed", replica, WAIT_SAMPLES),
        )
        for replica, samples in metrics.get("wait_s", {}).items()
        if samples
    ]


def _has_queue(ctx: AutoscalingContext, reports: Sequence[Report]) -> bool:
    """Requests wait in the routers because every replica refuses them, for most of a minute.
    Refusals before the last growth are ignored."""
    grown_s: float = ctx.current_time - (ctx.last_scale_up_time or 0.0)
    are_full = bool(reports) and all(report.refusing > 0.5 for report in reports)
    return grown_s > LOOK_BACK_S and are_full
