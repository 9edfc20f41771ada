"""Routing policies on real engines: `python -m tests.bench.engines` (some minutes, 7 GB of memory).

For each policy, a cluster with two vLLM replicas serves the same chats. The model is the built-in
model or another one of MODELS. SGLang's gateway routes to two of vLLM's own servers. The chats
share a few long system prompts, and their histories need more memory than the caches have. They
begin at random times, and there is a random pause before each turn; the seed is fixed. At the end,
one engine serves chats beside a batch job (beside_batch.py).
"""

import argparse
import asyncio
import json
import random
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.settings.options.common import CPU_BLOCK_SIZE
from tests.bench.apart import apart
from tests.bench.beside_batch import beside_batch
from tests.bench.stock_server import stock_server
from tests.bench.stream.gateway import MISSING, gateway, is_installed
from tests.bench.stream.mock_engine import HOST
from tests.bench.timed_chat import timed_chat
from tests.support.serving import start_cluster
from tests.support.tiny_models import tiny_model

# Models of other architectures have random weights, and layers as wide as those of a small model.
WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
MODELS: dict[str, dict[str, Any]] = {
    BUILTIN_MODEL: {},
    "gemma3": WIDE
    | {
        "num_hidden_layers": 24,
        "layer_types": [*["sliding_attention"] * 5, "full_attention"] * 4,
        "query_pre_attn_scalar": 64,
    },
    "lfm2": WIDE
    | {
        "num_hidden_layers": 24,
        "full_attn_idxs": [layer for layer in range(24) if layer % 3],
        "block_dim": 512,
        "conv_dim": 512,
    },
}
OURS = ("kvroute", "round-robin", "power-of-two")
SGLANG = "sglang"  # cache-aware policy of SGLang's gateway, with two of vLLM's own servers
POLICIES = (*OURS, SGLANG)
SYSTEM_PROMPTS = 3
SYSTEM_WORDS = 220
CHATS = 40
TURNS = 5
TURN_WORDS = 50
ANSWER_TOKENS = 24
CHATS_PER_S = 0.5
THINK_S = 12.0  # mean seconds between an answer and the next turn
CACHE_MB = 256  # size of each replica's cache: about 5,800 tokens in float32
LEARNING = 20  # number of the first requests, from which routers learn the engines' speed
SEED = 1
SERVED = "bench"  # name of the model in requests


@dataclass(frozen=True, slots=True)
class Answer:
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int


@dataclass(frozen=True, slots=True)
class Chat:
    system: str
    turns: Sequence[str]
    begins_s: float
    pauses_s: Sequence[float]  # pause before each turn


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.engines")
    parser.add_argument("--model", choices=MODELS, default=BUILTIN_MODEL)
    default = POLICIES if is_installed() else OURS
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=default)
    parser.add_argument("--chats", type=int, default=CHATS)
    parser.add_argument("--system-prompts", type=int, default=SYSTEM_PROMPTS)
    options = parser.parse_args()
    asked = chats(options.chats, options.system_prompts)
    with tempfile.TemporaryDirectory() as folder:
        compare(model_of(options.model, Path(folder)), options.policies, asked)
    if default != POLICIES:
        print(MISSING)
    print("\n" + apart(beside_batch).markdown())


def model_of(name: str, folder: Path) -> str:
    """Return the value of `kvroute serve --model` for a model."""
    return str(tiny_model(name, folder, **MODELS[name])) if MODELS[name] else name


def compare(model: str, policies: Sequence[str], asked: Sequence[Chat]) -> None:
    logs = {}
    print("| policy | hit share | TTFT p50 s | TTFT p90 s |\n|---|---|---|---|", flush=True)
    for policy in policies:
        if policy == SGLANG:
            answers = behind_sglang(model, asked)
        else:
            answers, logs[policy] = serve(model, policy, asked)
        ttft_s = quantiles([answer.ttft_s for answer in answers])
        print(f"| {policy} | {hit_share(answers):.3f} | {ttft_s} |", flush=True)
    print("\n| TTFT observed / predicted | requests | p50 | p90 |\n|---|---|---|---|")
    for policy, lines in logs.items():
        ratios = [line["ttft_s"] / line["predicted_ttft_s"] for line in lines]
        print(f"| {policy} | {len(ratios)} | {quantiles(ratios)} |")
        later = ratios[LEARNING:]
        print(f"| {policy}, after the first {LEARNING} | {len(later)} | {quantiles(later)} |")


def behind_sglang(model: str, asked: Sequence[Chat]) -> list[Answer]:
    """Run the chats with SGLang's gateway; return the answers. Each engine has one core."""
    dtype = "float32" if model == BUILTIN_MODEL else "auto"
    block = str(CPU_BLOCK_SIZE)  # as in kvroute's replicas
    alike = ("--max-model-len", "2048", "--block-size", block, "--dtype", dtype)
    with ExitStack() as stack:
        ports = [
            stack.enter_context(
                stock_server(
                    *(resolve(model), *alike),
                    name=SERVED,
                    cache_mb=CACHE_MB,
                    env={"VLLM_CPU_OMP_THREADS_BIND": core, "OMP_NUM_THREADS": "1"},
                )
            )[0]
            for core in ("0", "1")
        ]
        port, _ = stack.enter_context(gateway(ports, policy="cache_aware"))
        return asyncio.run(talk(f"http://{HOST}:{port}/v1", asked))


def serve(
    model: str, policy: str, asked: Sequence[Chat]
) -> tuple[list[Answer], list[dict[str, Any]]]:
    """Run the chats on a cluster with this policy; return the answers and the request log."""
    with tempfile.TemporaryDirectory() as folder:
        with start_cluster(
            *("--model", model, "--served-model-name", SERVED),
            *("--policy", policy, "--replicas", "2", "--request-log", folder),
            *("--max-model-len", "2048", "--kv-cache-memory-mb", str(CACHE_MB)),
        ) as cluster:
            answers = asyncio.run(talk(f"{cluster.url}/v1", asked))
        text = "".join(file.read_text() for file in Path(folder).iterdir())
    lines = [json.loads(line) for line in text.splitlines()]
    return answers, sorted(lines, key=lambda line: float(line["timestamp"]))


def chats(count: int, system_prompts: int) -> list[Chat]:
    rng = random.Random(SEED)
    words = " ".join(topics[name] for name in sorted(topics)).split()  # the text of Python's manual

    def passage(length: int) -> str:
        start = rng.randrange(len(words) - length)
        return " ".join(words[start : start + length])

    systems = [f"Answer from this text. {passage(SYSTEM_WORDS)}" for _ in range(system_prompts)]
    begins_s = np.cumsum([rng.expovariate(CHATS_PER_S) for _ in range(count)])
    return [
        Chat(
            system=rng.choice(systems),
            turns=[f"What does this mean? {passage(TURN_WORDS)}" for _ in range(TURNS)],
            begins_s=float(begin_s),
            pauses_s=[0.0, *(rng.expovariate(1 / THINK_S) for _ in range(TURNS - 1))],
        )
        for begin_s in begins_s
    ]


async def talk(url: str, chats: Sequence[Chat]) -> list[Answer]:
    """Run all chats, each at its time; return the answers to all turns."""
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=300) as client:
        answers = await asyncio.gather(*(hold(client, chat) for chat in chats))
    return [answer for chat in answers for answer in chat]


async def hold(client: AsyncOpenAI, chat: Chat) -> list[Answer]:
    await asyncio.sleep(chat.begins_s)
    history: list[ChatCompletionMessageParam] = [{"role": "system", "content": chat.system}]
    answers = []
    for turn, pause_s in zip(chat.turns, chat.pauses_s, strict=True):
        await asyncio.sleep(pause_s)
        history.append({"role": "user", "content": turn})
        text, answer = await ask(client, history)
        history.append({"role": "assistant", "content": text})
        answers.append(answer)
    return answers


async def ask(
    client: AsyncOpenAI, history: Sequence[ChatCompletionMessageParam]
) -> tuple[str, Answer]:
    answer = await timed_chat(client, SERVED, history, ANSWER_TOKENS)
    assert answer.times_s
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    ttft_s = answer.times_s[0] - answer.begun_s
    return answer.text, Answer(ttft_s, answer.usage.prompt_tokens, answer.cached_tokens)


def hit_share(answers: Sequence[Answer]) -> float:
    return sum(a.cached_tokens for a in answers) / sum(a.prompt_tokens for a in answers)


def quantiles(values: Sequence[float]) -> str:
    p50, p90 = np.percentile(values, [50, 90])
    return f"{p50:.2f} | {p90:.2f}"


if __name__ == "__main__":
    main()
