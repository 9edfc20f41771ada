"""The autoscaling policy: it keeps the wait of new requests short with as few replicas as it can.

The fleet grows if the measured wait is too long. It shrinks if the predicted wait with one replica
fewer is short enough. Serve calls the policy ten times a second. Serve only applies a change that
the policy returns for some time, within --replicas and --max-replicas. Serve pickles this module by
value, so it must not import other modules of kvroute.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from ray.serve.config import AutoscalingContext

SAMPLE_S = 2.0  # seconds between two samples that a replica reports
LOOK_BACK_S = 60.0  # seconds for which samples are kept
WAIT_SAMPLES = 5  # samples in a mean wait (10 s); with a minute of samples, growth would be late
LARGER = 1.25  # size of the larger cache in Report.missed, relative to the real cache
MAX_GROWTH = 2.0  # largest factor by which the fleet grows in one step
MAX_OCCUPANCY = 0.6  # a replica is only removed if the others stay busy for less than this share
TARGET_SHARE = 0.5  # maximum predicted wait after a removal, as a share of the target wait


@dataclass(frozen=True, slots=True)
class Report:
    """The means of one replica's recent samples."""

    wait_s: float  # wait of a new request on this replica
    service_s: float  # time by which one request delays the requests behind it
    occupancy: float  # share of time in which the replica is busy, 0 to 1
    refusing: float = 0.0  # share of samples in which the replica was full and refused requests
    # Share of the computed tokens that a cache LARGER times the size would still have had.
    missed: float = 0.0


def desired_replicas(
    reports: Sequence[Report], *, running: int, target: int, target_wait_s: float, has_queue: bool
) -> int:
    """Return the new target number of replicas.

    A new request goes to a replica with a short backlog, so its wait is estimated as the lower
    quartile of the replicas' waits. A long queue on an old replica does not count while other
    replicas are empty, because queued requests would not move to a further replica.

    Args:
        reports: Reports of the running replicas from which samples have arrived.
        running: Number of running replicas.
        target: The current target number of replicas.
        target_wait_s: Maximum acceptable wait of a new request.
        has_queue: Whether requests wait in the routers' queues.
    """
    waits_s = sorted([report.wait_s for report in reports] + [0.0] * (running - len(reports)))
    wait_s = waits_s[(running - 1) // 4] if waits_s else 0.0
    if wait_s > target_wait_s or has_queue:
        growth = min(MAX_GROWTH, wait_s / target_wait_s)
        return max(target, running + 1, math.ceil(running * growth))
    is_known = len(reports) == running
    if is_known and target > 1 and is_enough(reports, target - 1, target_wait_s):
        return target - 1
    return target


def is_enough(reports: Sequence[Report], replicas: int, target_wait_s: float) -> bool:
    """Return whether one replica fewer, that is, `replicas`, can serve the load with a reserve."""
    if not reports:
        return False
    # A factor of 1 or more: the removed replica's cache is lost, so more tokens are computed.
    more_work = 1.0 + fmean(report.missed for report in reports) * cache_loss(replicas)
    share = more_work * sum(report.occupancy for report in reports) / replicas
    if share >= MAX_OCCUPANCY:
        return False
    service_s = fmean(report.service_s for report in reports)
    return queueing_s(replicas, share, service_s) < TARGET_SHARE * target_wait_s


def cache_loss(replicas: int) -> float:
    """Return by how many steps the fleet's cache shrinks to that of `replicas`, one fewer than now.

    A step is a factor of LARGER. Hits are roughly linear in the logarithm of a cache's size. So a
    cache that is smaller by one step loses about as many hits as a cache that is larger by one step
    would gain.
    """
    return math.log1p(1.0 / replicas) / math.log(LARGER)


def queueing_s(servers: int, share: float, service_s: float) -> float:
    """Return the mean wait in seconds of a new request in a queue with several servers.

    Sakasegawa's approximation for M/M/n: "An approximation formula L = a b^p / (1 - b)", 1977.

    Args:
        servers: Number of servers, which are replicas here.
        share: Share of the time in which each server is busy, below 1.
        service_s: Mean time in which a server serves one request.
    """
    power = math.sqrt(2.0 * (servers + 1)) - 1.0
    return service_s * math.pow(share, power) / (servers * (1.0 - share))


class WaitPolicy:
    """Adapts desired_replicas() to Serve's interface."""

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
    """Return a report for each replica that has samples.

    Args:
        metrics: Name of a metric -> replica -> samples, oldest first.
    """

    def mean(name: str, replica: Any, count: int = 0) -> float:
        samples = metrics.get(name, {}).get(replica, ())  # older versions lack some metrics
        return fmean(sample.value for sample in samples[-count:]) if samples else 0.0

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
    """Return whether requests wait in the routers' queues.

    This is assumed if every replica has refused requests for most of a minute. Refusals before the
    last growth are ignored.
    """
    grown_s: float = ctx.current_time - (ctx.last_scale_up_time or 0.0)
    are_full = bool(reports) and all(report.refusing > 0.5 for report in reports)
    return grown_s > LOOK_BACK_S and are_full
