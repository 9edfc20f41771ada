"""Runs policies on the same trace at the same rate, and measures the cluster's saturation."""

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context

from rich.progress import Progress

from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.summary import Slo, Summary, summarise
from kvroute.replay.workload.closed_loop import OPEN_LOOP, Loop
from kvroute.replay.workload.trace import (
    Request,
    TraceError,
    at_speed,
    ideal_hit_tokens,
    native_rps,
)

# Saturation is the best throughput of these policies if requests arrive faster than they can serve.
REFERENCES = ("kvroute", "sglang")
# Rate of these arrivals, as a multiple of the throughput. At a higher rate, a policy could delay
# long prompts for ever.
OVERLOAD = 1.05
OVERLOAD_STEPS = 4  # number of runs; each run's rate follows from the throughput of the run before


@dataclass(frozen=True, slots=True)
class PolicyRun:
    """The replay of the trace with one policy."""

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
    slo: Slo | None = None,
    jobs: int = 1,
) -> list[PolicyRun]:
    """Return one run for each policy, in order; run `jobs` of them in parallel processes."""
    run = partial(_run, requests=requests, cluster=cluster, seed=seed, loop=loop, slo=slo)
    if jobs == 1:
        tasks = ((name, progress.add_task(name, total=len(requests))) for name in policies)
        return [run(name, on_first_token=partial(progress.advance, task)) for name, task in tasks]
    task = progress.add_task(", ".join(policies), total=len(policies))
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = [pool.submit(run, name) for name in policies]
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
    """Return saturation: the highest rate of requests that the best reference policy can serve.

    The throughput is measured in prompt tokens, and divided by the mean prompt length. To count
    requests would be wrong, since a policy that delays long prompts serves more requests with the
    same work. Such a policy also serves a few more tokens, since a short prompt takes less time per
    token. Both effects grow with the overload, so OVERLOAD is small.

    Raises:
        TraceError: The trace is too short.
    """
    tokens = sum(request.input_tokens for request in recorded) / len(recorded)

    def served_rps(offered_rps: float) -> float:
        requests = at_speed(recorded, offered_rps / native_rps(recorded))
        runs = compare(REFERENCES, requests, cluster, seed=seed, progress=progress, jobs=jobs)
        best_tokens_per_s = max(run.summary.prompt_tokens_per_s for run in runs)
        if not best_tokens_per_s:
            raise TraceError(
                f"{len(recorded)} requests are too few to find the saturation; set --rate or "
                "--speed (such as 1) instead of --load"
            )
        return best_tokens_per_s / tokens

    rate_rps = _prefill_bound_rps(recorded, cluster)
    for _ in range(OVERLOAD_STEPS):
        rate_rps = served_rps(OVERLOAD * rate_rps)
    return rate_rps


def _prefill_bound_rps(recorded: Sequence[Request], cluster: Cluster) -> float:
    """Return the requests/s if decoding took no time and every repeated block was a hit."""
    prefill_s = sum(
        cluster.engine.prefill.seconds(hits, request.input_tokens)
        for request, hits in zip(recorded, ideal_hit_tokens(recorded), strict=True)
    )
    return len(recorded) * sum(cluster.speeds) / prefill_s


def _run(
    policy: str,
    *,
    requests: Sequence[Request],
    cluster: Cluster,
    seed: int,
    loop: Loop,
    slo: Slo | None,
    on_first_token: Callable[[], None] = lambda: None,
) -> PolicyRun:
    outcome = simulate(
        requests,
        cluster,
        policy,
        seed=seed,
        follow_ups=loop.follow_ups,
        queued=loop.queued,
        on_first_token=on_first_token,
    )
    return PolicyRun(outcome, summarise(policy, requests, outcome, loop, slo))
