"""The CPU time of a simulated engine without any transport."""

import asyncio
import time
from contextlib import aclosing
from uuid import uuid4

import numpy as np
import uvloop

from kvroute.contract.generation import GenerateRequest
from kvroute.process.builtin_model import BUILTIN_MODEL
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.engines import start_engines
from kvroute.settings.replica import ReplicaSettings
from tests.bench.stream.caller import Tally
from tests.bench.stream.load import RAMP_S, SETTLE_S, Cost, Load, cost, first_tokens
from tests.support.answers import completion
from tests.support.chunks import streamed

PROMPT_TOKENS = 50  # length of a prompt, about as in the chats of the load
ENGINE = "replica"  # role to which the engine's cost is assigned


def alone(load: Load, *, decode_ms: float) -> Cost:
    """Measure the engine. The CPU time is that of this process."""
    return uvloop.run(_measure(load, decode_ms))


async def _measure(load: Load, decode_ms: float) -> Cost:
    (engine,) = await start_engines(
        ReplicaSettings(
            model=BUILTIN_MODEL,
            served_model_name="m",
            redis_url="",
            engine="simulated",
            simulated_prefill_tokens_per_s=0,
            simulated_decode_ms=decode_ms,
        )
    )
    current = [Tally()]  # a list, so that the readers see when it gets a new tally
    readers = []
    for first in first_tokens(load):
        readers.append(asyncio.create_task(_read(engine, current, first, load.tokens)))
        await asyncio.sleep(RAMP_S / load.concurrent)
    await asyncio.sleep(SETTLE_S)
    current[0] = Tally()
    begun_s, before_s = time.perf_counter(), time.process_time()
    await asyncio.sleep(load.window_s)
    spent_s = {ENGINE: time.process_time() - before_s}
    measured = cost(current[0], time.perf_counter() - begun_s, spent_s)
    for reader in readers:
        reader.cancel()
    await asyncio.wait(readers)
    await engine.close()
    return measured


async def _read(engine: Engine, current: list[Tally], first: int, tokens: int) -> None:
    """Read one answer after the other, and count in the tally `current[0]`."""
    call = completion(max_tokens=first)
    while True:
        request = GenerateRequest(uuid4().hex, _prompt(), call=call)
        before_s, got = time.perf_counter(), 0
        async with aclosing(streamed(engine.generate, request)) as chunks:
            async for chunk in chunks:
                now_s, tally = time.perf_counter(), current[0]
                (tally.gaps_s if got else tally.ttft_s).append(now_s - before_s)
                before_s, got = now_s, got + len(chunk.token_ids)
                tally.tokens += len(chunk.token_ids)
                tally.events += 1
        current[0].answers += 1
        call = completion(max_tokens=tokens)


def _prompt() -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    return np.random.randint(1000, 40_000, PROMPT_TOKENS).astype(np.uint32)
