"""Policies are compared on one trace at one arrival rate, a share of the highest possible rate."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.progress import Progress

from kvroute.replay.report import Summary, summarise
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.trace import Request, TraceError, at_speed, ideal_hit_tokens, native_rps

REFERENCES = ("kvroute", "sglang")  # the saturation is the best throughput of these under overload
OVERLOAD = 1.15  # arrivals over throughput; more would cost hits, and so throughput


@dataclass(frozen=True, slots=True)
class Run:
    """The results of one policy on the trace."""

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
    """The replicas' throughput if decoding took no time and every repeated block were a hit."""
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
