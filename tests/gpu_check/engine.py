"""Measures vLLM alone: first tokens of new and of cached prompts, steps, and copies to a GPU.

The argument is a JSON object: model (null: the built-in one), lengths of prompts in tokens, batches
(pairs: sequences in a step, tokens of context of each), and engine_args. The last line is a profile
of this engine, for the option --engine of `kvroute replay`.
"""

import json
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
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
        options |= {"load_format": "dummy"}
    start_s = time.monotonic()
    engine = LLM(settings["model"] or resolve(BUILTIN_MODEL), **(options | settings["engine_args"]))
    yield f"ready after {time.monotonic() - start_s:.0f} s"
    seconds(engine, [tokens(200, 0)], 4)
    cold_s: dict[int, float] = {}  # length of a prompt -> seconds to its first token
    for length in settings["lengths"]:
        yield first_token(engine, length, cold_s)
    step_s: dict[tuple[int, int], float] = {}  # sequences, context tokens of each -> seconds
    for batch, context in settings["batches"]:
        step_s[batch, context] = seconds_per_step(engine, batch, context)
        yield (
            f"{batch} sequences of {context:,} tokens: {1e3 * step_s[batch, context]:.1f} ms a step"
        )
    yield "profile for `kvroute replay --engine FILE`:"
    config = engine.llm_engine.vllm_config
    profile = fitted_profile(cold_s, step_s, config.scheduler_config.max_num_batched_tokens)
    yield f"`{json.dumps(profile)}`"


def first_token(engine: Any, length: int, cold_s: dict[int, float]) -> str:
    """Measure first tokens of new prompts of this length and of cached ones; keep the new ones'.

    The better of two new prompts counts: the first one of a length may compile kernels.
    """
    prompts = [tokens(length, seed * 100_000 + length) for seed in (1, 2)]
    cold_s[length] = min(seconds(engine, [prompt], 1) for prompt in prompts)
    cached_s = min(
        seconds(engine, [prompts[-1] + tokens(NEW_TOKENS, seed)], 1) for seed in (1, 2, 3)
    )
    return (
        f"{length:,} tokens: first token {1e3 * cold_s[length]:.0f} ms "
        f"({length / cold_s[length]:,.0f} tokens/s), "
        f"{1e3 * cached_s:.0f} ms if all but {NEW_TOKENS} are cached: "
        f"{cold_s[length] / cached_s:.1f} times sooner"
    )


def seconds_per_step(engine: Any, batch: int, context: int) -> float:
    """Return the seconds of a step that generates a token for each of `batch` sequences."""
    prompts = [tokens(context, 1_000_000 + number) for number in range(batch)]
    seconds(engine, prompts, 1)  # from now on, the prompts are cached
    return (seconds(engine, prompts, STEPS + 1) - seconds(engine, prompts, 1)) / STEPS


def fitted_profile(
    cold_s: Mapping[int, float], step_s: Mapping[tuple[int, int], float], chunk_tokens: int
) -> dict[str, float]:
    """Fit replay's model of an engine (replay/hardware/engine_model.py) to the measured times.

    A step takes step_s + sequence_s * sequences + context_token_s * context tokens. A new prompt of
    n tokens takes n / r + n^2 / (2 * a * r) and one step for each chunk, where r is
    prefill_tokens_per_s and a is attention_tokens. Both are fitted by least squares, with relative
    errors, and no term may be negative.
    """
    rows = [
        [1 / second, batch / second, batch * context / second]
        for (batch, context), second in step_s.items()
    ]
    step, sequence, token = least_squares(rows, [1.0] * len(rows))
    rows, values = [], []
    for length, second in cold_s.items():
        steps_s = math.ceil(length / chunk_tokens) * (step + sequence)
        rows.append([length / second, length**2 / second])
        values.append(max(0.0, second - steps_s) / second)
    linear, square = least_squares(rows, values)
    profile = {"step_s": step, "sequence_s": sequence, "context_token_s": token}
    if linear > 0:
        profile["prefill_tokens_per_s"] = 1 / linear
    if linear > 0 and square > 0:
        profile["attention_tokens"] = linear / (2 * square)
    return {name: float(f"{value:.3g}") for name, value in profile.items()} | {
        "chunk_tokens": chunk_tokens
    }


def least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Return the factors of the columns that fit best; a factor that would be negative is 0."""
    matrix = np.array(rows)
    columns = list(range(matrix.shape[1]))
    factors = np.zeros(matrix.shape[1])
    while columns:
        fit = np.linalg.lstsq(matrix[:, columns], np.array(values), rcond=None)[0]
        if fit.min() >= 0:
            factors[columns] = fit
            break
        del columns[int(fit.argmin())]
    return [float(factor) for factor in factors]


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
