"""Two tenants with one session id: the end of one's session takes nothing from the other."""

from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from kvroute.contract.generation import GenerateRequest, TokenIds
from kvroute.contract.keep import RetentionHint
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.sessions import session_number
from tests.support.answers import completion
from tests.support.chunks import streamed

BLOCK = 32
INSTANT = SimulatedConfig(
    prefill_tokens_per_s=0, decode_step_s=0, decode_per_seq_s=0, capacity_blocks=40
)


def prompt(number: int, blocks: int) -> TokenIds:
    return np.arange(blocks * BLOCK + 1, dtype=np.uint32) + 10_000 * number


async def ask(
    engine: SimulatedEngine, ids: TokenIds, tenant: str, keep: RetentionHint | None = None
) -> int:
    """How many tokens were cached."""
    request = GenerateRequest(f"{tenant}-{ids[0]}", ids, tenant, call=completion(), keep=keep)
    cached = 0
    async with aclosing(streamed(engine.generate, request)) as chunks:
        async for chunk in chunks:
            cached = chunk.cached_tokens
    return cached


@pytest.mark.parametrize("ending", ["a", "b"])
async def test_the_end_of_a_session_is_of_one_tenant(ending: str) -> None:
    engine = SimulatedEngine(INSTANT)
    for tenant in "ab":
        keep = RetentionHint(session=session_number(tenant, "chat"))
        await ask(engine, prompt(1, 10), tenant, keep)
    await engine.end_session(session_number(ending, "chat"))
    await ask(engine, prompt(2, 25), "c")  # needs room
    staying = "b" if ending == "a" else "a"
    assert await ask(engine, prompt(1, 10), staying) == 10 * BLOCK
    assert await ask(engine, prompt(1, 10), ending) < 10 * BLOCK
    await engine.close()


async def test_a_session_that_ends_during_a_turn_is_over_for_what_that_leaves() -> None:
    engine = SimulatedEngine(replace(INSTANT, decode_step_s=0.01))
    for session in (1, 2):
        call, keep = completion(max_tokens=9), RetentionHint(session=session)
        request = GenerateRequest(f"{session}", prompt(session, 10), call=call, keep=keep)
        async with aclosing(streamed(engine.generate, request)) as chunks:
            await anext(chunks)
            if session == 2:
                await engine.end_session(2)
            async for _ in chunks:
                pass
    await ask(engine, prompt(3, 25), "")  # needs room
    assert await ask(engine, prompt(1, 10), "") == 10 * BLOCK
    await engine.close()
