"""First tokens of a prompt whose blocks are computed, pulled, in host memory, or on the disk.

Two engines run on this machine, and pull from each other over the loopback interface. Each prompt
is new, and the engines swap their roles after each. Then one engine is started again with its disk
cache. `python -m tests.bench.pulls engines` or `restart` measures one of the two.
"""

import asyncio
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace

from kvroute.contract.generation import Chunk, GenerateRequest
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.fabric.pull import Pull, carried
from tests.bench.report import Row, Section
from tests.support.answers import ids_of
from tests.support.chunks import streamed
from tests.support.engines import (
    BLOCK,
    PULL_KEY,
    PULLING,
    Running,
    prompt_of,
    pull_results,
    started,
)
from tests.support.waiting import until

LENGTHS = (500, 1_000, 2_000, 4_000)  # tokens of a prompt
REPEATS = 5
ANSWER_TOKENS = 16
WITHIN_S = 60.0
OPTIONS: dict[str, Any] = {
    "host_cache_gb": "1.2",
    "replica_features": PULLING,
    "kv_cache_memory_mb": 300,
    "max_model_len": 4_096,
}
KINDS = ("computed", "pulled", "own host memory", "KV cache")


async def between_engines() -> tuple[Section, Section]:
    """Measure pulls between two engines."""
    times: dict[tuple[int, str], list[float]] = defaultdict(list)
    transfers: dict[int, list[tuple[float, float]]] = defaultdict(list)
    async with started("vllm", **OPTIONS) as first, started("vllm", **OPTIONS) as second:
        peer, own = first, second
        for seed in range(2):  # warm up
            await _pulled(peer, own, prompt_of(LENGTHS[0], seed), {}, [])
            peer, own = own, peer
        for tokens in LENGTHS:
            for repeat in range(REPEATS):
                prompt, once = prompt_of(tokens, 10 * tokens + repeat), dict[str, float]()
                await _pulled(peer, own, prompt, once, transfers[tokens])
                for kind, took_s in once.items():
                    times[tokens, kind].append(took_s)
                peer, own = own, peer
    load = os.getloadavg()[0]
    rows: list[Row] = [
        {
            "tokens": tokens,
            **{f"{kind}, s": _spread(times[tokens, kind]) for kind in KINDS},
            "computed / pulled": median(times[tokens, "computed"])
            / median(times[tokens, "pulled"]),
        }
        for tokens in LENGTHS
    ]
    moved: list[Row] = [
        {
            "tokens": tokens,
            "MB": median(size for size, _ in transfers[tokens]) / 1e6,
            "the pull, s": _spread([took_s for _, took_s in transfers[tokens]]),
            "GB/s": _spread([size / took_s / 1e9 for size, took_s in transfers[tokens]]),
        }
        for tokens in LENGTHS
    ]
    title = f"First tokens of {BUILTIN_MODEL}, {REPEATS} prompts of each length (load {load:.0f})"
    return Section(title, rows), Section("The pulls", moved)


async def _pulled(
    peer: Running,
    own: Running,
    prompt: list[int],
    times: dict[str, float],
    transfers: list[tuple[float, float]],
) -> None:
    """Measure one prompt: `peer` computes it, then `own` pulls it and runs it twice again."""
    times["computed"], computed = await _first_token(peer, prompt)
    blocks = (len(prompt) - 1) // BLOCK
    await until(lambda: len(peer.table.in_host) >= blocks)
    await asyncio.sleep(0.5)  # the last copies
    pull = Pull("peer", peer.exchanger.exchanging().address, PULL_KEY, len(prompt), WITHIN_S)
    times["pulled"], pulled = await _first_token(own, prompt, pull)
    (result,) = pull_results(pulled)
    assert result.tokens == blocks * BLOCK, result
    transfers.append((result.size_bytes, result.took_s))
    times["KV cache"], cached = await _first_token(own, prompt)
    for seed in range(2):  # fill the KV cache with other prompts, which are in host memory
        await _first_token(own, prompt_of(3_900, 1_000_000 + seed))
    times["own host memory"], reloaded = await _first_token(own, prompt)
    assert ids_of(computed) == ids_of(pulled) == ids_of(cached) == ids_of(reloaded)


async def _first_token(
    running: Running, prompt: list[int], pull: Pull | None = None
) -> tuple[float, list[Chunk]]:
    """Return the time to the first token of a prompt, in seconds, and the whole answer."""
    request = GenerateRequest("", np.array(prompt, np.uint32), max_tokens=ANSWER_TOKENS)
    running.requests += 1
    request = replace(request, request_id=f"b{running.requests}", features=carried(pull))
    began_s, first_s, chunks = time.perf_counter(), 0.0, []
    async for chunk in streamed(running.engine.generate, request):
        first_s = first_s or time.perf_counter() - began_s
        chunks.append(chunk)
    return first_s, chunks


async def after_restart() -> Section:
    """Measure an engine that is started again with its disk cache."""
    with tempfile.TemporaryDirectory() as folder:
        options = OPTIONS | {"disk_cache": Path(folder), "disk_cache_gb": 5.0}
        prompts = {
            tokens: [prompt_of(tokens, 20 * tokens + repeat) for repeat in range(REPEATS)]
            for tokens in LENGTHS
        }
        async with started("vllm", **options) as running:
            await _first_token(running, prompt_of(LENGTHS[0], 0))
            before = await _all(running, prompts)
            blocks = sum((tokens - 1) // BLOCK for tokens in LENGTHS) * REPEATS
            await until(lambda: len(list(Path(folder).rglob("*.kv"))) >= blocks)
        began_s = time.perf_counter()
        async with started("vllm", **options) as running:
            start_s = time.perf_counter() - began_s
            await _first_token(running, prompt_of(LENGTHS[0], 0))
            after = await _all(running, prompts)
    rows: list[Row] = [
        {
            "tokens": tokens,
            "computed before, s": _spread([took_s for took_s, _ in before[tokens]]),
            "from the disk after the restart, s": _spread([took_s for took_s, _ in after[tokens]]),
            "tokens from the disk": median(chunks[0].cached_tokens for _, chunks in after[tokens]),
            "same text": sum(
                ids_of(one) == ids_of(other)
                for (_, one), (_, other) in zip(before[tokens], after[tokens], strict=True)
            ),
        }
        for tokens in LENGTHS
    ]
    return Section(f"A restart with a disk cache; the start took {start_s:.0f} s", rows)


async def _all(
    running: Running, prompts: dict[int, list[list[int]]]
) -> dict[int, list[tuple[float, list[Chunk]]]]:
    return {
        tokens: [await _first_token(running, prompt) for prompt in same]
        for tokens, same in prompts.items()
    }


def _spread(values: list[float]) -> str:
    return f"{median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    names = sys.argv[1:] or ["engines", "restart"]
    sections = [*asyncio.run(between_engines())] if "engines" in names else []
    sections += [asyncio.run(after_restart())] if "restart" in names else []
    for section in sections:
        print(section.markdown(), end="\n\n")
