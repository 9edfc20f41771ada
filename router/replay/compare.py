"""Policies on one trace at one rate of arrivals, and the rate that is the most they can serve."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.progress import Progress

from router.replay.report import Summary, summarise
from router.replay.simulate import Cluster, Outcome, simulate
from router.replay.trace import Request, TraceError, at_speed, ideal_hit_tokens, native_rps

REFERENCES = ("kvroute", "sglang")  # the best of these under overload is the saturation
OVERLOAD = 1.15  # arrivals over what comes through: a longer queue costs hits, hence throughput


@dataclass(frozen=True, slots=True)
class Run:
    """What one policy made of the trace."""

    outcome: Outcome
    summary: Summary


def compare(
    policies: Sequence[str],
    requests: Sequence[Request],
    cluster: Cluster,
    *,
    seed: int,
    progress: Progress,
) -> list[Run]:
    """One run for each policy, in their order."""
    return [_run(policy, requests, cluster, seed, progress, policy) for policy in policies]


def saturation_rps(
    recorded: Sequence[Request], cluster: Cluster, *, seed: int, progress: Progress
) -> float:
    """First tokens a second that the best reference policy reaches under deliberate overload."""

    def served_rps(offered_rps: float) -> float:
        requests = at_speed(recorded, offered_rps / native_rps(recorded))
        rates = [
            _run(
                policy, requests, cluster, seed, progress, f"overload: {policy}"
            ).summary.throughput_rps
            for policy in REFERENCES
        ]
        if not any(rates):
            raise TraceError(
                f"{len(recorded)} requests are too few to find the saturation; give --speed, such "
                "as 1, instead of --load"
            )
        return max(rates)

    return served_rps(OVERLOAD * served_rps(_prefill_bound_rps(recorded, cluster)))


def _prefill_bound_rps(recorded: Sequence[Request], cluster: Cluster) -> float:
    """What the replicas could serve if decoding were free and every repeated block a hit."""
    prefill_s = sum(
        cluster.engine.prefill.seconds(hits, request.input_tokens)
        for request, hits in zip(recorded, ideal_hit_tokens(recorded), strict=True)
    )
    return len(recorded) * cluster.replicas / prefill_s


def _run(
    policy: str,
    requests: Sequence[Request],
    cluster: Cluster,
    seed: int,
    progress: Progress,
    label: str,
) -> Run:
    task = progress.add_task(label, total=len(requests))
    outcome = simulate(
        requests, cluster, policy, seed=seed, on_first_token=lambda: progress.advance(task)
    )
    return Run(outcome, summarise(policy, requests, outcome))
