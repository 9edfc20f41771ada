"""Measures vLLM alone: first tokens of new and of cached prompts, steps, and copies to a GPU.

The argument is a JSON object: model (null: the built-in one), lengths of prompts in tokens, and
batches (numbers of sequences in a step).
"""

import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from vllm import LLM, SamplingParams, TokensPrompt

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

NEW_TOKENS = 32  # tokens of a cached prompt that are new
STEPS = 32  # steps over which the time of one is averaged
COPY_BYTES = 1 << 28


def main() -> None:
    """Print each figure in a line that begins with a dash."""
    settings = json.loads(sys.argv[1])
    for line in measured(settings):
        print(f"- {line}", flush=True)


def measured(settings: dict[str, Any]) -> Iterator[str]:
    """Yield the figures in words."""
    if torch.cuda.is_available():
        yield from copies()
    options: dict[str, Any] = {"enable_prefix_caching": True, "disable_log_stats": True}
    if settings["model"] is None:
        options |= {"dtype": "float32", "enforce_eager": True, "max_model_len": 2048}
        options |= {"kv_cache_memory_bytes": 1 << 28, "block_size": 32}
    else:
        options |= {"load_format": "dummy", "max_model_len": 40_000}
    start_s = time.monotonic()
    engine = LLM(settings["model"] or resolve(BUILTIN_MODEL), **options)
    yield f"ready after {time.monotonic() - start_s:.0f} s"
    seconds(engine, [tokens(200, 0)], 4)
    for length in settings["lengths"]:
        prompt = tokens(length, length)
        cold_s = seconds(engine, [prompt], 1)
        cached_s = min(
            seconds(engine, [prompt + tokens(NEW_TOKENS, seed)], 1) for seed in (1, 2, 3)
        )
        yield (
            f"{length:,} tokens: first token {1e3 * cold_s:.0f} ms ({length / cold_s:,.0f} "
            f"tokens/s), {1e3 * cached_s:.0f} ms if all but {NEW_TOKENS} are cached: "
            f"{cold_s / cached_s:.1f} times sooner"
        )
    for batch in settings["batches"]:
        prompts = [tokens(500, 1000 + number) for number in range(batch)]
        seconds(engine, prompts, 1)
        step_s = (seconds(engine, prompts, STEPS + 1) - seconds(engine, prompts, 1)) / STEPS
        yield f"{batch} sequences: {1e3 * step_s:.1f} ms a step, {batch / step_s:,.0f} tokens/s"


def seconds(engine: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> float:
    """Return the seconds to generate this many tokens for each prompt."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    requests = [TokensPrompt(prompt_token_ids=[*prompt]) for prompt in prompts]
    start_s = time.monotonic()
    engine.generate(requests, params, use_tqdm=False)
    return time.monotonic() - start_s


def tokens(count: int, seed: int) -> list[int]:
    """Return random token ids."""
    return random.Random(seed).choices(range(10, 49_000), k=count)


def copies() -> Iterator[str]:
    """Yield the speed of copies between host memory and the GPU."""
    gpu = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    for name, is_pinned in (("pinned", True), ("pageable", False)):
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
        gpu.copy_(host)
        torch.cuda.synchronize()
        start_s = time.monotonic()
        for _ in range(10):
            gpu.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        speed = 10 * COPY_BYTES / (time.monotonic() - start_s)
        yield f"copies from {name} host memory: {speed / 1e9:.1f} GB/s"


if __name__ == "__main__":
    main()
