"""The cost of autoscaling: the same chats on a fleet that scales, and on a fleet that does not.

The first fleet scales from 2 replicas to 4 and back to 2. The second fleet always has 4 replicas.
The replicas are simulated engines that are so slow that this machine's cores do not limit them.
"""

import asyncio
import contextlib
import random
import statistics
import time
from collections.abc import AsyncIterator, Sequence

import httpx
import numpy as np

from tests.bench.report import Row, Section
from tests.bench.routers import Answered, Turn, send
from tests.support.serving import start_cluster

LEAST, MOST = 2, 4
TOKENS_PER_S = 1_000  # speed of a replica's prefill
CALM_CHATS_PER_S = 0.4  # at this rate, 2 replicas compute prefill for about 40% of the time
BUSY_CHATS_PER_S = 1.5  # at this rate, 4 replicas do so for about 70%; it is too much for 2
# Seconds after the start at which many chats begin to come, few come again, and the run ends.
BUSY_FROM_S, BUSY_UNTIL_S, ENDS_S = 30.0, 110.0, 230.0
SYSTEM_PROMPTS = 16  # number of system prompts; the n-th is used 1/n as often as the first
SYSTEM_TOKENS = 512
TURNS = 4
TURN_TOKENS = 400  # mean number of new tokens of a turn
THINK_S = 4.0  # mean seconds between turns
WINDOW_S = 5.0  # seconds of a row of the table
JOINED_S = 5.0  # seconds after its first answer in which a replica counts as new

AUTOSCALING = ("--max-replicas", str(MOST), "--target-wait-s", "0.5", "--shrink-delay-s", "20")


def resize() -> Section:
    sent = turns(seed=0)
    scaled, sizes = asyncio.run(_run("--replicas", str(LEAST), *AUTOSCALING, sent=sent))
    constant, _ = asyncio.run(_run("--replicas", str(MOST), sent=sent))
    starts = [WINDOW_S * number for number in range(int(ENDS_S / WINDOW_S))]
    rows = [
        {"from s": int(start), "replicas": _size(sizes, start + WINDOW_S)}
        | _window(scaled, start, "")
        | _window(constant, start, f"{MOST} replicas: ")
        for start in starts
    ]
    notes = [
        f"Hit share of the whole run: {_hit_share(scaled):.3f} with autoscaling, which used "
        f"{_mean_size(sizes):.2f} replicas on average; {_hit_share(constant):.3f} with {MOST} "
        "replicas. No request failed.",
        *_newcomers(scaled, sizes),
    ]
    return Section(f"Autoscaling, {len(sent)} requests", rows, notes)


def turns(seed: int) -> list[Turn]:
    """Return the turns of chats that begin at random times.

    The prompt of each turn begins with the chat so far.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1_000, 40_000) for _ in range(count)]

    systems = [tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    weights = [1.0 / rank for rank in range(1, SYSTEM_PROMPTS + 1)]
    sent, begins_s = list[Turn](), 0.0
    while begins_s < ENDS_S:
        at_s, (prompt,) = begins_s, rng.choices(systems, weights)
        for _ in range(TURNS):
            prompt = prompt + tokens(round(TURN_TOKENS * rng.uniform(0.5, 1.5)))
            sent.append(Turn(at_s, prompt))
            at_s += rng.uniform(0.5, 1.5) * THINK_S
        is_busy = BUSY_FROM_S <= begins_s < BUSY_UNTIL_S
        begins_s += rng.expovariate(BUSY_CHATS_PER_S if is_busy else CALM_CHATS_PER_S)
    return sorted((turn for turn in sent if turn.at_s < ENDS_S), key=lambda turn: turn.at_s)


Sizes = list[tuple[float, list[str]]]  # seconds since the start, and the replicas at that time


async def _run(*args: str, sent: Sequence[Turn]) -> tuple[list[Answered], Sizes]:
    with start_cluster(
        *("--engine", "simulated", "--simulated-prefill-tokens-per-s", str(TOKENS_PER_S)), *args
    ) as cluster:
        async with _watching(cluster.url) as sizes:
            return await send(cluster.url, sent), sizes


@contextlib.asynccontextmanager
async def _watching(url: str) -> AsyncIterator[Sizes]:
    """Record the fleet's replicas each second until the context ends."""
    begun, sizes = time.perf_counter(), Sizes()

    async def check() -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            while True:
                listed = (await client.get("/v1/cluster")).json()["replicas"]
                sizes.append((time.perf_counter() - begun, [replica["id"] for replica in listed]))
                await asyncio.sleep(1)

    watching = asyncio.create_task(check())
    try:
        yield sizes
    finally:
        watching.cancel()


def _size(sizes: Sizes, at_s: float) -> int:
    return next((len(ids) for seen_s, ids in reversed(sizes) if seen_s <= at_s), LEAST)


def _mean_size(sizes: Sizes) -> float:
    return statistics.fmean(len(ids) for _, ids in sizes)


def _window(answers: Sequence[Answered], start_s: float, prefix: str) -> Row:
    in_window = [answer for answer in answers if start_s <= answer.at_s < start_s + WINDOW_S]
    p50_s, p90_s = np.percentile([answer.ttft_s for answer in in_window], [50, 90])
    return {
        f"{prefix}hit share": _hit_share(in_window),
        f"{prefix}TTFT p50 s": float(p50_s),
        f"{prefix}p90 s": float(p90_s),
    }


def _hit_share(answers: Sequence[Answered]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(
        answer.prompt_tokens for answer in answers
    )


def _newcomers(answers: Sequence[Answered], sizes: Sizes) -> list[str]:
    """Return a sentence about each replica that joined after the start."""
    first = set(sizes[0][1])
    return [
        _newcomer(answers, replica)
        for replica in dict.fromkeys(answer.replica for answer in answers)
        if replica not in first
    ]


def _newcomer(answers: Sequence[Answered], replica: str) -> str:
    began_s = next(answer.at_s for answer in answers if answer.replica == replica)
    then = [answer for answer in answers if began_s <= answer.at_s < began_s + JOINED_S]
    own = [answer for answer in then if answer.replica == replica]
    fleet = len({answer.replica for answer in then})
    p90_s = np.percentile([answer.ttft_s for answer in own], 90)
    return (
        f"A replica that joined a fleet (now {fleet} replicas) got {len(own)} of {len(then)} "
        f"requests in its first {JOINED_S:g} s; their TTFT p90 was {p90_s:.2f} s."
    )
