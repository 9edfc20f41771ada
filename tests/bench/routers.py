"""Compares one router and several: the same chats on clusters with different numbers of routers.

The replicas are simulated engines that are so slow that this machine's cores do not limit them.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
import msgspec
import numpy as np

from kvroute.prefill.speed import PrefillModel
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.sim_engine.config import SimulatedConfig
from tests.bench.report import Row, Section
from tests.support.serving import start_cluster

ROUTERS = (1, 2, 4, 8)
RUNS = 3
REPLICAS = 4
SPEED = PrefillModel(tokens_per_s=2_000, attention_tokens=SimulatedConfig().attention_tokens)
BLOCKS = 4_096  # number of blocks of 32 tokens in each replica's cache
CHATS_PER_S = 1.65  # at this rate, the replicas compute prefill for about 70% of the time
CHATS_S = 80.0  # seconds in which requests are sent
WARM_UP_S = 30.0  # earlier requests do not count, because the first chats have fewer turns
SYSTEM_PROMPTS = 4
SYSTEM_TOKENS = 512
TURNS = 6
TURN_TOKENS = 600  # mean number of new tokens of a turn
THINK_S = 5.0  # mean seconds between turns
ANSWER_TOKENS = 8


@dataclass(frozen=True)
class Turn:
    at_s: float  # time of sending, in seconds since the start
    prompt: list[int]


@dataclass(frozen=True)
class Answered:
    at_s: float  # time of the request, in seconds since the start
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int
    replica: str


def routers() -> Section:
    rows = [row(count, run) for run in range(RUNS) for count in ROUTERS]
    return Section(f"Routers, {REPLICAS} simulated replicas, {len(turns(0))} requests a run", rows)


def row(count: int, seed: int) -> Row:
    """Run the chats on a cluster with `count` routers, and return the results."""
    with start_cluster(
        *("--engine", "simulated", "--replicas", str(REPLICAS), "--routers", str(count)),
        *("--simulated-prefill-tokens-per-s", str(SPEED.tokens_per_s)),
        *("--simulated-blocks", str(BLOCKS)),
    ) as cluster:
        answers = asyncio.run(send(cluster.url, turns(seed)))
    counted = [answer for answer in answers if answer.at_s >= WARM_UP_S]
    prompt_tokens = sum(answer.prompt_tokens for answer in counted)
    cached_tokens = sum(answer.cached_tokens for answer in counted)
    prefill_s = sum(SPEED.seconds(answer.cached_tokens, answer.prompt_tokens) for answer in counted)
    work = Counter[str]()
    for answer in counted:
        work[answer.replica] += answer.prompt_tokens - answer.cached_tokens
    p50_s, p90_s = np.percentile([answer.ttft_s for answer in counted], [50, 90])
    return {
        "routers": count,
        "run": seed,
        "hit share": cached_tokens / prompt_tokens,
        "TTFT p50 s": float(p50_s),
        "TTFT p90 s": float(p90_s),
        "busy": prefill_s / (REPLICAS * (CHATS_S - WARM_UP_S)),
        "imbalance": max(work.values()) * REPLICAS / work.total(),
    }


def turns(seed: int) -> list[Turn]:
    """Return the turns of chats that begin at random times.

    The prompt of each turn begins with the chat so far.
    """
    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(1_000, 40_000) for _ in range(count)]

    systems = [tokens(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    sent, begins_s = list[Turn](), 0.0
    while (begins_s := begins_s + rng.expovariate(CHATS_PER_S)) < CHATS_S:
        at_s, prompt = begins_s, rng.choice(systems)
        for _ in range(TURNS):
            prompt = prompt + tokens(round(TURN_TOKENS * rng.uniform(0.5, 1.5)))
            sent.append(Turn(at_s, prompt))
            at_s += rng.uniform(0.5, 1.5) * THINK_S
    return sorted((turn for turn in sent if turn.at_s < CHATS_S), key=lambda turn: turn.at_s)


async def send(url: str, turns: Sequence[Turn]) -> list[Answered]:
    """Send each turn at its time, even if earlier ones are not answered yet."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # HAProxy spreads connections
    async with aiohttp.ClientSession(connector=connector) as session:
        begun = time.perf_counter()

        async def ask(turn: Turn) -> Answered:
            await asyncio.sleep(begun + turn.at_s - time.perf_counter())
            return await _ask(session, url, turn)

        return list(await asyncio.gather(*map(ask, turns)))


async def _ask(session: aiohttp.ClientSession, url: str, turn: Turn) -> Answered:
    body = {
        "model": BUILTIN_MODEL,
        "prompt": turn.prompt,
        "max_tokens": ANSWER_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    payload = msgspec.json.encode(body)
    begun = time.perf_counter()
    async with session.post(f"{url}/v1/completions", data=payload) as response:
        response.raise_for_status()
        events = response.content
        first = await events.readline()
        ttft_s = time.perf_counter() - begun
        lines = [first, *[line async for line in events]]
    last = [line for line in lines if line.startswith(b"data: {")][-1]
    usage = msgspec.json.decode(last.removeprefix(b"data: "))["usage"]
    return Answered(
        at_s=turn.at_s,
        ttft_s=ttft_s,
        prompt_tokens=usage["prompt_tokens"],
        cached_tokens=usage["prompt_tokens_details"]["cached_tokens"],
        replica=response.headers["x-kvroute-replica"],
    )
