"""The benefit of a tier in host memory on a real engine: `python -m tests.bench.host_tier`.

An engine with a host tier and one without get the same prompts: conversations with the built-in
model. Between two turns of a conversation, other prompts have three times as many tokens as fit
into the engine's own memory.
"""

import asyncio
import statistics
import time
from dataclasses import dataclass

from tests.bench.report import Row, Section
from tests.support.answers import ids_of
from tests.support.engines import BLOCK, Running, prompt_of, started

CACHE_MB = 128  # size of the engine's cache: about 90 blocks
TIER_GB = "1"
PROMPTS = (10 * BLOCK, 20 * BLOCK)  # lengths of the first turns in tokens
FLOOD = 20 * BLOCK  # length of the other prompts in tokens
ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Turn:
    """The result of a turn after the first turn of its conversation."""

    prompt_tokens: int
    cached_tokens: int
    ttft_s: float


def main() -> None:
    print(asyncio.run(host_tier()).markdown())


async def host_tier() -> Section:
    without, _ = await _measure("without a tier", "0")
    with_tier, speeds = await _measure(f"with {TIER_GB} GB", TIER_GB)
    title = f"Later turns after a flood of three times the cache (medians of {ROUNDS} turns)"
    return Section(title, without + with_tier, [speeds])


async def _measure(name: str, size_gb: str) -> tuple[list[Row], str]:
    """Measure an engine; return the rows, and a sentence about the speed of copies."""
    async with started("vllm", kv_cache_memory_mb=CACHE_MB, host_cache_gb=size_gb) as running:
        rows = [_row(name, await _turns(running, tokens)) for tokens in PROMPTS]
        return rows, _speeds(running)


def _row(name: str, turns: list[Turn]) -> Row:
    cached = sum(turn.cached_tokens for turn in turns) / sum(turn.prompt_tokens for turn in turns)
    ttft_ms = 1e3 * statistics.median(turn.ttft_s for turn in turns)
    tokens = turns[0].prompt_tokens
    return {"": name, "prompt, tokens": tokens, "cached": f"{cached:.0%}", "TTFT, ms": ttft_ms}


def _speeds(running: Running) -> str:
    moves = running.transfers
    in_bytes, in_s = sum(move.in_bytes for move in moves), sum(move.in_s for move in moves)
    out_bytes, out_s = sum(move.out_bytes for move in moves), sum(move.out_s for move in moves)
    if not in_s or not out_s:
        return "Nothing was copied."
    return (
        f"Copies: {in_bytes / in_s / 1e9:.1f} GB/s from host memory, "
        f"{out_bytes / out_s / 1e9:.1f} GB/s to it."
    )


async def _turns(running: Running, tokens: int) -> list[Turn]:
    turns = []
    for round_ in range(ROUNDS):
        prompt = prompt_of(tokens, seed=tokens + round_)
        answer = ids_of(await running.ask(prompt))
        for number in range(3 * running.engine.facts.capacity_blocks * BLOCK // FLOOD + 1):
            await running.ask(prompt_of(FLOOD, seed=10_000 + 100 * round_ + number), max_tokens=1)
        turns.append(await _turn(running, [*prompt, *answer, *prompt_of(BLOCK, seed=1)]))
    return turns


async def _turn(running: Running, prompt: list[int]) -> Turn:
    began_s = time.perf_counter()
    chunks = await running.ask(prompt, max_tokens=1)
    return Turn(len(prompt), chunks[0].cached_tokens, time.perf_counter() - began_s)


if __name__ == "__main__":
    main()
