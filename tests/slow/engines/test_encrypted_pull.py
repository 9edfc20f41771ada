"""An engine of vLLM pulls blocks over TLS, also from a peer that was started without it."""

from typing import Any

import pytest
from msgspec.structs import replace

from kvroute.replica.fabric.pull import Pull, carried
from kvroute.wire.address import TlsMode
from tests.support.engines import (
    BLOCK,
    PULL_KEY,
    PULLING,
    Running,
    prompt_of,
    pull_results,
    request_of,
    started,
)
from tests.support.waiting import until

pytestmark = pytest.mark.filterwarnings("ignore")  # vLLM's own

PROMPT = 20 * BLOCK  # tokens
LONG_S = 60.0
OWN: dict[str, Any] = {
    "host_cache_gb": "0.6",
    "replica_features": PULLING,
    "kv_cache_memory_mb": 256,
    "max_model_len": 4_096,
}


async def pulled(peer: Running, own: Running, prompt: list[int], tls: TlsMode) -> int:
    """Let `peer` compute a prompt, and return how many of its tokens `own` pulls."""
    before = len(peer.table.in_host)
    await peer.run(request_of(prompt, max_tokens=16))
    await until(lambda: len(peer.table.in_host) >= before + len(prompt) // BLOCK)
    pull = Pull("peer", peer.exchanger.exchanging().address, PULL_KEY, len(prompt), LONG_S, tls)
    chunks = await own.run(replace(request_of(prompt, max_tokens=16), features=carried(pull)))
    (result,) = pull_results(chunks)
    return result.tokens


async def test_blocks_are_pulled_with_and_without_tls() -> None:
    async with started("vllm", **OWN, wire_tls=True) as first, started("vllm", **OWN) as second:
        assert await pulled(first, second, prompt_of(PROMPT, seed=1), "made") >= PROMPT - BLOCK
        assert await pulled(second, first, prompt_of(PROMPT, seed=2), "off") >= PROMPT - BLOCK
