"""Loads other weights into one rank of vLLM, in the replica's process."""

import asyncio
import time

from msgspec.structs import replace

from kvroute.contract.records import EngineFacts
from kvroute.replica.vllm_engine.core.lora import Adapters
from kvroute.replica.vllm_engine.core.rank_core import RankCore

FREE_S = 30.0  # seconds within which ended requests have to free their blocks
POLL_S = 0.05  # seconds between two attempts to clear the cache


async def load_weights(
    core: RankCore, facts: EngineFacts, adapters: Adapters, source: str, key: str
) -> EngineFacts:
    """Load weights, and return the rank's new facts; see Engine.load_weights."""
    ends_s = time.monotonic() + FREE_S
    while not await core.call("reset_prefix_cache"):
        if time.monotonic() >= ends_s:
            raise RuntimeError(f"its requests still hold blocks {FREE_S:g} s after their end")
        await asyncio.sleep(POLL_S)
    await core.llm.reset_mm_cache()
    format_: str = await core.call("kvroute_load_weights", source, key)
    adapters.loaded.clear()  # vLLM has unloaded them
    return replace(facts, weights=key, format=format_ or facts.format)
