"""Compares the built-in model in bfloat16 and in float32 on this machine's CPU.

Both engines run on the same core and take turns, so that other load on the machine affects both
equally. The engine's CPU time shows how long it would take on an idle core.
"""

import asyncio
import itertools
import os
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import psutil

from kvroute.contract.generation import GenerateRequest
from kvroute.process.builtin_model import BUILTIN_MODEL, resolve
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.engines import prepare_vllm
from kvroute.replica.vllm_engine.process.cpu_affinity import Cores, claim_cores
from kvroute.settings.replica import ReplicaSettings
from tests.bench.report import Row, Section
from tests.support.chunks import streamed

DTYPES = ("bfloat16", "float32")
PROMPTS = (200, 1_000, 2_000)  # lengths of prompts in tokens
STREAMS = (1, 8)  # numbers of streams at the same time
STREAM_PROMPT = 100  # length of a stream's prompt in tokens
ANSWER = 33  # length of a stream's answer in tokens
ROUNDS = 5  # number of rounds that count, after one for warming up
KV_CACHE_MB = 512


class Moment(NamedTuple):
    """The time at which a token arrived."""

    at_s: float
    cpu_s: float  # CPU time that the engine had used until then


@dataclass(frozen=True)
class Running:
    engine: Engine
    processes: list[psutil.Process]  # the engine's processes

    def now(self) -> Moment:
        times = [process.cpu_times() for process in self.processes]
        return Moment(time.monotonic(), sum(time_.user + time_.system for time_ in times))

    def sizes(self) -> dict[str, float]:
        facts = self.engine.facts
        blocks = facts.capacity_blocks + 1  # one is vLLM's null block
        return {
            "KV bytes a token": (KV_CACHE_MB << 20) // (blocks * facts.block_size),
            "tokens in the KV cache": facts.capacity_blocks * facts.block_size,
            "resident MB": sum(process.memory_info().rss for process in self.processes) >> 20,
        }


def dtype() -> Section:
    return asyncio.run(_compare())


async def _compare() -> Section:
    cores = claim_cores(1)
    engines = {dtype: await _start(dtype, cores) for dtype in DTYPES}
    results = {dtype: defaultdict[str, list[float]](list) for dtype in DTYPES}
    for number in range(ROUNDS + 1):
        for dtype in DTYPES if number % 2 else DTYPES[::-1]:
            values = await _round(engines[dtype])
            for name, value in values.items():
                results[dtype][name] += [value] if number else []
    bfloat16, float32 = (
        {name: statistics.median(values) for name, values in results[dtype].items()}
        | engines[dtype].sizes()
        for dtype in DTYPES
    )
    rows: list[Row] = [
        {
            "": name,
            "bfloat16": bfloat16[name],
            "float32": float32[name],
            "float32 / bfloat16": float32[name] / bfloat16[name],
        }
        for name in bfloat16
    ]
    for running in engines.values():
        await running.engine.close()
    notes = [f"Medians of {ROUNDS} rounds; `--kv-cache-memory-mb {KV_CACHE_MB}`."]
    return Section(f"{BUILTIN_MODEL} on one core", rows, notes)


async def _start(dtype: str, cores: Cores) -> Running:
    folder = resolve(BUILTIN_MODEL)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")  # keeps the log out of the table
    prepare_vllm(folder, cores.threads(1))
    from kvroute.replica.vllm_engine.async_llm import VllmEngine

    settings = ReplicaSettings(
        model=BUILTIN_MODEL,
        served_model_name=BUILTIN_MODEL,
        redis_url="",
        dtype=dtype,
        max_model_len=4_096,
        kv_cache_memory_mb=KV_CACHE_MB,
    )
    before = _children()
    (engine,) = await VllmEngine.start(settings, folder, cores)
    return Running(engine, [*(_children() - before)])


def _children() -> set[psutil.Process]:
    return set(psutil.Process().children(recursive=True))


async def _round(running: Running) -> dict[str, float]:
    results = {}
    for prompt in PROMPTS:
        begun = running.now()
        (first,) = await _stream(running, prompt, answer=1)
        results[f"TTFT s, {prompt:,} prompt tokens"] = first.at_s - begun.at_s
        results[f"... of the engine's CPU time, {prompt:,}"] = first.cpu_s - begun.cpu_s
    for streams in STREAMS:
        asked = (_stream(running, STREAM_PROMPT, ANSWER) for _ in range(streams))
        answers = await asyncio.gather(*asked)
        begun = max(answer[0] for answer in answers)
        ended = min(answer[-1] for answer in answers)
        tokens = sum(begun < token <= ended for answer in answers for token in answer)
        results[f"decoded tokens/s, {streams} at once"] = tokens / (ended.at_s - begun.at_s)
        results[f"... a second of CPU time, {streams}"] = tokens / (ended.cpu_s - begun.cpu_s)
    return results


_numbers = itertools.count()


async def _stream(running: Running, prompt: int, answer: int) -> list[Moment]:
    """Run a request with a new prompt, and return the time at which each token arrived."""
    number = next(_numbers)
    ids = np.random.default_rng(number).integers(1_000, 40_000, prompt).astype(np.uint32)
    request = GenerateRequest(str(number), ids, max_tokens=answer)
    return [running.now() async for _ in streamed(running.engine.generate, request)]


if __name__ == "__main__":
    print(dtype().markdown())
