"""Ladders of rates that llm-d has published, beside replay's predictions.

`python -m tests.bench.ladder FLEET` replays a ladder under round robin and under llm-d's rule, and
prints a table for docs/measurements.md. The published figures are facts from llm-d/llm-d,
guides/optimized-baseline/benchmark-results. Each was measured once by its authors.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from typing import Annotated, NamedTuple

import numpy as np
import typer

from kvroute.replay.hardware.profiles import H100, MEMORY_SHARE, Model, derived
from kvroute.replay.simulate import Cluster, Outcome, simulate
from kvroute.replay.workload.published_shapes import shared_prefix
from kvroute.replay.workload.trace import Request

POLICIES = ("round-robin", "llm-d")
WARM_UP = (15, 50)  # requests/s, and seconds
# Rate of a stage in requests/s -> its seconds.
STAGES = {
    3: 20,
    10: 20,
    15: 20,
    20: 38,
    22: 34,
    25: 30,
    30: 25,
    35: 21,
    40: 38,
    43: 36,
    46: 33,
    49: 30,
    52: 29,
    55: 27,
    57: 26,
    60: 25,
}
# Pause after a stage. In truth it is 30 s after the last answer; a longer one changes nothing,
# since nothing happens on an idle fleet.
PAUSE_S = 1000.0


class Figures(NamedTuple):
    """Figures of a stage; None: not published."""

    output_tokens_per_s: float
    ttft_p50_s: float | None
    ttft_p90_s: float | None


class PublishedFleet(NamedTuple):
    """A fleet, its workload, and what was published about it."""

    replicas: int
    gpus: int  # H100 of each replica
    model: Model
    question: int
    answer: int
    memory_share: float
    # Policy -> figures of each stage: output tokens/s; TTFT p50 and p90 in seconds.
    published: Mapping[str, Sequence[tuple[float, float | None, float | None]]]


QWEN3_32B = Model(32.8e9, layers=64, width=8192, kv_width=1024)
# Half of its layers attend to a window of 128 tokens only.
GPT_OSS_120B = Model(
    116.8e9,
    layers=18,
    width=4096,
    kv_width=512,
    expert_parameters=114.7e9,
    expert_share=4 / 128,
    weight_bytes=0.53,
)
FLEETS = {
    "vllm-qwen3-32b": PublishedFleet(
        *(8, 2, QWEN3_32B, 1200, 1000, MEMORY_SHARE),
        {
            "round-robin": [
                *((1889, None, None), (4944, None, None), (6066, None, None), (4555, 0.9, 2.4)),
                *((6239, 18.3, 46.1), (6350, 0.4, 0.9), (6251, 0.8, 4.9), (6544, 21.0, 46.2)),
                *((6228, 20.0, 37.9), (6860, 25.7, 61.9), (6526, 20.4, 66.8), (6956, 66.9, 139.9)),
                *((7049, 69.9, 143.8), (6402, 78.3, 158.5), (6317, 83.1, 153.3)),
                (6764, 88.1, 154.1),
            ],
            "llm-d": [
                *((1511, None, None), (4597, None, None), (8995, None, None), (6656, 0.4, 4.2)),
                *((10809, 0.2, 1.4), (10452, 0.2, 0.2), (10509, 0.1, 0.2), (12290, 0.1, 0.2)),
                *((14134, 0.1, 0.3), (13522, 0.2, 0.2), (14050, 0.1, 0.2), (14941, 0.9, 2.1)),
                *((14542, 0.3, 1.3), (14607, 0.1, 0.2), (13451, 0.2, 19.9), (13528, 0.2, 0.9)),
            ],
        },
    ),
    "sglang-qwen3-32b": PublishedFleet(
        *(8, 2, QWEN3_32B, 1200, 1000, MEMORY_SHARE),
        {
            "round-robin": [
                *((1647, None, 0.867), (4644, None, 1.656), (5740, None, 1.396)),
                *((6018, None, 33.8), (5843, None, 35.8), (5906, None, 39.5), (5831, None, 43.2)),
                *((5746, None, 47.8), (6629, None, 119.5), (6828, None, 151.4)),
                *((6686, None, 125.0), (6285, None, 126.4), (6488, None, 131.2)),
                *((5855, None, 129.8), (5769, None, 129.6), (5642, None, 172.7)),
            ],
            "llm-d": [
                *((1536, None, 0.148), (4838, None, 0.161), (7056, None, 0.173)),
                *((11077, None, 0.244), (11693, None, 0.152), (12063, None, 0.157)),
                *((12675, None, 0.161), (13066, None, 0.156), (14463, None, 0.303)),
                *((14399, None, 0.222), (14561, None, 0.236), (14493, None, 0.212)),
                *((14578, None, 0.217), (14711, None, 0.231), (14954, None, 0.413)),
                (14839, None, 0.437),
            ],
        },
    ),
    "vllm-gpt-oss-120b": PublishedFleet(
        *(16, 1, GPT_OSS_120B, 500, 500, 0.95),
        {
            "round-robin": [
                *((1160, None, 0.198), (4836, None, 0.206), (6986, None, 0.215)),
                *((9077, None, 0.313), (9346, None, 0.296), (10579, None, 0.35)),
                *((12211, None, 0.378), (11861, None, 1.715), (13889, None, 8.06)),
                *((14089, None, 7.002), (14603, None, 8.892), (14562, None, 11.42)),
                *((15158, None, 11.336), (14644, None, 12.459), (15330, None, 12.415)),
                (13234, None, 15.365),
            ],
            "llm-d": [
                *((1301, None, 0.078), (4240, None, 0.087), (7639, None, 0.089)),
                *((10104, None, 0.097), (10967, None, 0.1), (12021, None, 0.102)),
                *((13654, None, 0.103), (15505, None, 0.107), (14311, None, 0.235)),
                *((14262, None, 3.232), (14425, None, 6.057), (13615, None, 4.088)),
                *((15465, None, 7.551), (14796, None, 11.146), (14775, None, 9.16)),
                (16501, None, 7.063),
            ],
        },
    ),
}


def main(
    fleet: Annotated[str, typer.Argument(help=f"One of {', '.join(FLEETS)}.")] = "vllm-qwen3-32b",
    policy: Annotated[str, typer.Option(help="Policies, comma-separated.")] = ",".join(POLICIES),
    seed: Annotated[int, typer.Option(help="Seed of all random numbers.")] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Number of processes.")] = 1,
) -> None:
    """Print a table for each policy: published figures, predicted ones, and the error."""
    if fleet not in FLEETS:
        raise typer.BadParameter(f"{fleet!r} is not a fleet; expected one of {', '.join(FLEETS)}")
    policies = policy.split(",")
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        runs = [pool.submit(predicted, fleet, name, seed) for name in policies]
        for name, run in zip(policies, runs, strict=True):
            print(f"\n{fleet}, {name}\n")
            for line in table(FLEETS[fleet].published.get(name), run.result()):
                print(line, flush=True)


def predicted(name: str, policy: str, seed: int) -> list[Figures]:
    """Replay the ladder; return the figures of each stage."""
    fleet = FLEETS[name]
    profile = derived(H100, fleet.model, gpus=fleet.gpus)
    more_bytes = (fleet.memory_share - MEMORY_SHARE) * fleet.gpus * H100.memory_bytes
    kv_tokens = profile.kv_tokens + int(more_bytes / profile.kv_bytes)
    stages, requests = ladder(fleet, random.Random(seed))
    cluster = Cluster(fleet.replicas, kv_tokens, engine=profile.engine())
    outcome = simulate(requests, cluster, policy, seed=seed)
    return [figures(stage, outcome, fleet.answer) for stage in stages]


def ladder(fleet: PublishedFleet, rng: random.Random) -> tuple[list[slice], list[Request]]:
    """Return the range of each stage's requests, and all requests."""
    rates = [WARM_UP, *STAGES.items()]
    count = sum(rate * seconds for rate, seconds in rates)
    shape = shared_prefix(count, rng, question=fleet.question, answer=fleet.answer)
    stages, requests, now_s = list[slice](), list[Request](), 0.0
    for rate, seconds in rates:
        first = len(requests)
        for _ in range(rate * seconds):
            requests.append(replace(next(shape), arrival_s=now_s))
            now_s += rng.expovariate(rate)
        stages.append(slice(first, len(requests)))
        now_s += PAUSE_S
    return stages[1:], requests


def figures(stage: slice, outcome: Outcome, answer: int) -> Figures:
    """Return the figures of a stage. Its end is that of its last answer."""
    arrival_s, finished_s = outcome.arrival_s[stage], outcome.finished_s[stage]
    ttft_s = np.array(outcome.first_token_s[stage]) - np.array(arrival_s)
    p50_s, p90_s = np.percentile(ttft_s, [50, 90])
    tokens = answer * len(arrival_s)
    return Figures(tokens / (max(finished_s) - min(arrival_s)), float(p50_s), float(p90_s))


def table(
    published: Sequence[tuple[float, float | None, float | None]] | None,
    stages: Sequence[Figures],
) -> Iterator[str]:
    """Yield the lines of a table, and the median error of the output tokens per second."""
    yield "| requests/s | output tokens/s: published, predicted | error | TTFT p50 | TTFT p90 |"
    yield "|---|---|---|---|---|"
    errors = []
    for number, (rate, ours) in enumerate(zip(STAGES, stages, strict=True)):
        theirs = Figures(*published[number]) if published else None
        error = None
        if theirs is not None:
            error = ours.output_tokens_per_s / theirs.output_tokens_per_s - 1
            errors.append(abs(error))
        tokens = [f"{each.output_tokens_per_s:,.0f}" for each in (theirs, ours) if each]
        cells = [
            f"{rate}",
            ", ".join(tokens),
            "" if error is None else f"{error:+.0%}",
            _times(theirs and theirs.ttft_p50_s, ours.ttft_p50_s),
            _times(theirs and theirs.ttft_p90_s, ours.ttft_p90_s),
        ]
        yield f"| {' | '.join(cells)} |"
    if errors:
        yield ""
        yield f"Median error of output tokens/s: {np.median(errors):.1%}"


def _times(theirs: float | None, ours: float | None) -> str:
    return f"{'not published' if theirs is None else f'{theirs:g} s'}, {ours:.2f} s"


if __name__ == "__main__":
    typer.run(main)
