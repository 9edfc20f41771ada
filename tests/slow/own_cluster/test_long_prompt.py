"""Whatever the model takes reaches a replica: nothing between has a smaller limit."""

import httpx

from kvroute.process.builtin_model import BUILTIN_MODEL
from tests.support.serving import start_cluster

TOKENS = 1_000_000
OPTIONS = (
    *("--engine", "simulated", "--replicas", "1"),
    *("--simulated-prefill-tokens-per-s", "0", "--simulated-decode-ms", "0"),
    *("--max-model-len", f"{TOKENS + 100}", "--simulated-blocks", f"{TOKENS // 32 + 10}"),
)


def test_a_prompt_of_a_million_tokens_is_answered_and_then_cached() -> None:
    prompt = [number % 40_000 for number in range(TOKENS)]
    body = {"model": BUILTIN_MODEL, "prompt": prompt, "max_tokens": 2}
    with start_cluster(*OPTIONS) as cluster:
        for cached_tokens in (0, TOKENS - 32):
            answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=120)
            usage = answer.raise_for_status().json()["usage"]
            assert usage["prompt_tokens"] == TOKENS
            assert usage["prompt_tokens_details"]["cached_tokens"] == cached_tokens
