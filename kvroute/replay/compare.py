"""Policies are compared on one trace at one arrival rate, a share of the highest possible rate."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context

from rich.progress import Progress

from kvroute.replay.report import Summary, summarise
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.workload.closed_loop import OPEN_LOOP, Loop
from kvroute.replay.workload.trace import (
    Request,
    TraceError,
    at_speed,
    ideal_hit_tokens,
    native_rps,
)

REFERENCES = ("kvroute", "sglang")  # the saturation is the best throughput of these under overload
OVERLOAD = 1.05  # arrivals over throughput; with more, a policy can delay long prompts for ever
OVERLOAD_STEPS = 4  # each comes nearer to that, from above


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
    loop: Loop = OPEN_LOOP,
    jobs: int = 1,
) -> list[Run]:
    """One run for each policy, in their order; so many at a time, in processes of their own."""
    if jobs == 1:
        return [_watched(each, requests, cluster, seed, loop, progress) for each in policies]
    task = progress.add_task(", ".join(policies), total=len(policies))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = [pool.submit(_run, each, requests, cluster, seed, loop) for each in policies]
        for _ in as_completed(runs):
            progress.advance(task)
        return [run.result() for run in runs]


def saturation_rps(
    recorded: Sequence[Request],
    cluster: Cluster,
    *,
    seed: int,
    progress: Progress,
    jobs: int = 1,
) -> float:
    """The rate of requests at which the best reference policy can just serve as many prompt tokens
    as come: measured in tokens, while a little more come than are served.

    A policy that delays long prompts serves more requests with the same work, and a few more
    tokens too, since those at a prompt's start take less: the more, the greater the overload.
    """
    tokens = sum(request.input_tokens for request in recorded) / len(recorded)

    def served_rps(offered_rps: float) -> float:
        requests = at_speed(recorded, offered_rps / native_rps(recorded))
        runs = compare(REFERENCES, requests, cluster, seed=seed, progress=progress, jobs=jobs)
        most = max(run.summary.prompt_tokens_per_s for run in runs)
        if not most:
            raise TraceError(
                f"{len(recorded)} requests are too few to find the saturation; give --rate or "
                "--speed, such as 1, instead of --load"
            )
        return most / tokens

    found = _prefill_bound_rps(recorded, cluster)
    for _ in range(OVERLOAD_STEPS):
        found = served_rps(OVERLOAD * found)
    return found


def _prefill_bound_rps(recorded: Sequence[Request], cluster: Cluster) -> float:
    """The replicas' throughput if decoding took no time and every repeated block were a hit."""
    prefill_s = sum(
        cluster.engine.prefill.seconds(hits, request.input_tokens)
        for request, hits in zip(recorded, ideal_hit_tokens(recorded), strict=True)
    )
    return len(recorded) * sum(cluster.speeds) / prefill_s


def _watched(
    policy: str,
    requests: Sequence[Request],
    cluster: Cluster,
    seed: int,
    loop: Loop,
    progress: Progress,
) -> Run:
    task = progress.add_task(policy, total=len(requests))
    return _run(policy, requests, cluster, seed, loop, lambda: progress.advance(task))


def _run(
    policy: str,
    requests: Sequence[Request],
    cluster: Cluster,
    seed: int,
    loop: Loop,
    on_first_token: Callable[[], None] = lambda: None,
) -> Run:
    outcome = simulate(
        requests,
        cluster,
        policy,
        seed=seed,
        follow_ups=loop.follow_ups,
        queued=loop.queued,
        on_first_token=on_first_token,
    )
    return Run(outcome, summarise(policy, requests, outcome, loop))
