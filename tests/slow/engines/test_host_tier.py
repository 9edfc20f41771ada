"""A replica's engine with a tier in host memory: answers, hits and events of a real model."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.keep import Order, RetentionHint
from kvroute.replica.engine.kv_events import Transfers
from tests.support.answers import ids_of
from tests.support.chunks import streamed
from tests.support.engines import (
    BLOCK,
    SHALLOW_CACHE_MB,
    Running,
    prompt_of,
    request_of,
    shallow_model,
    started,
)
from tests.support.routed import REPLICA, Routed
from tests.support.tiny_models import tiny_model
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

PROMPT = 20 * BLOCK  # tokens


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def tiered(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    """A shallow model with room for 84 blocks, and for 1,017 in host memory."""
    model = shallow_model(tmp_path_factory.mktemp("tiered") / "model")
    async with started(
        "vllm", model=str(model), kv_cache_memory_mb=SHALLOW_CACHE_MB, host_cache_gb="0.1"
    ) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def cache(tiered: Running) -> AsyncIterator[Running]:
    """Both tiers are empty."""
    assert await tiered.engine.reset_prefix_cache()
    await until(lambda: len(tiered.table) == 0)
    tiered.transfers.clear()
    yield tiered
    assert (await tiered.compare()).drift == 0


async def flood(running: Running, first: int = 1_000) -> None:
    """Three times what the engine's own memory holds."""
    for number in range(3 * running.engine.facts.capacity_blocks // 20 + 1):
        await running.ask(prompt_of(PROMPT, first + number), max_tokens=1)


async def test_a_later_turn_finds_in_host_memory_what_was_evicted(cache: Running) -> None:
    facts, prompt = cache.engine.facts, prompt_of(PROMPT, 1)
    assert facts.host
    assert facts.host.blocks > 10 * facts.capacity_blocks
    computed = await cache.ask([*prompt, 7], max_tokens=16)
    await flood(cache)
    reloaded = await cache.ask([*prompt, 7], max_tokens=16)
    assert computed[0].cached_tokens == 0
    assert reloaded[0].cached_tokens == PROMPT
    assert ids_of(reloaded) == ids_of(computed)
    told = total(cache.transfers)
    assert told.reloaded_tokens == PROMPT
    assert told.in_bytes == PROMPT // BLOCK * facts.host.block_bytes < told.out_bytes
    assert told.in_s > 0


async def test_a_pin_in_host_memory_outlasts_a_flood_of_both_tiers(cache: Running) -> None:
    facts, prompt = cache.engine.facts, prompt_of(PROMPT, 5)
    assert facts.host
    other = prompt_of(PROMPT, 6)
    await cache.pin("law", prompt, in_host=True)
    await cache.ask(other, max_tokens=1)
    assert (cache.engine.host_pins, cache.engine.pins) == ({"law": 20}, {})
    for number in range(facts.host.blocks // 20 + 2):
        await cache.ask(prompt_of(PROMPT, 2_000 + number), max_tokens=1)
    assert await cache.cached_tokens(prompt) == PROMPT
    assert await cache.cached_tokens(other) == 0
    await cache.engine.unpin("law")
    assert cache.engine.host_pins == {}
    assert (await cache.compare()).drift == 0


async def test_an_idle_engine_tells_of_its_last_copies(cache: Running) -> None:
    await cache.ask(prompt_of(PROMPT, 2), max_tokens=1)
    await until(lambda: len(cache.table.in_host) == PROMPT // BLOCK)


async def test_answers_are_kept_too(cache: Running) -> None:
    prompt = prompt_of(BLOCK, 3)
    answer = ids_of(await cache.ask(prompt, max_tokens=3 * BLOCK, ignore_eos=True))
    await flood(cache)
    assert await cache.cached_tokens([*prompt, *answer[:-1]]) == 3 * BLOCK


async def test_a_clear_empties_both_tiers(cache: Running) -> None:
    await cache.ask(prompt_of(PROMPT, 4), max_tokens=1)
    for _ in range(2):
        assert await cache.engine.reset_prefix_cache()
    await until(lambda: len(cache.table) == 0)
    assert (await cache.compare()).blocks == 0
    assert await cache.cached_tokens(prompt_of(PROMPT, 4)) == 0


@pytest.mark.parametrize("seed", range(3))
async def test_the_table_is_what_the_engine_holds(cache: Running, seed: int) -> None:
    """Requests at the same time, of which some are aborted; sessions that end; clears."""
    random_ = random.Random(seed)

    async def one(number: int) -> None:
        blocks, session = random_.randint(1, 25), random_.randint(1, 12)
        keep = RetentionHint(random_.choice((Order.USUAL, Order.UNLIKELY)), session)
        request = request_of(prompt_of(blocks * BLOCK, session), max_tokens=random_.randint(1, 40))
        request = replace(request, request_id=f"s{seed}-{number}", keep=keep)
        most = random_.choice((1, 100))
        chunks = streamed(cache.engine.generate, request)
        async for _ in chunks:
            most -= 1
            if not most:
                break
        await chunks.aclose()
        if random_.random() < 0.2:
            await cache.engine.end_session(session)
        if random_.random() < 0.05:
            await cache.engine.reset_prefix_cache()

    for turn in range(8):
        await asyncio.gather(*(one(8 * turn + number) for number in range(8)))
    assert (await cache.compare()).drift == 0


async def test_a_model_with_linear_attention_finds_its_states_there_too(tmp_path: Path) -> None:
    """As the router expects."""
    async with started(
        "vllm",
        model=str(tiny_model("qwen3-next", tmp_path)),
        dtype="bfloat16",  # linear attention has no other on CPUs
        kv_cache_memory_mb=8,
        host_cache_gb="0.2",
    ) as running:
        routed, prompt = Routed(running), prompt_of(620, 1)
        await running.ask(prompt, max_tokens=1)
        await flood(running)
        await flood(running, first=2_000)
        await routed.receive()
        placement = routed.fleet.place(np.array(prompt, np.uint32), [REPLICA], 0.0)
        again = await running.ask(prompt, max_tokens=1)
        await until(lambda: total(running.transfers).reloaded_tokens > 0)
        layout = running.engine.facts.layout
        assert layout
        whole = (len(prompt) - 1) // layout.hit_tokens  # blocks: 3 of 160 or 192 tokens, by kernel
        cached = whole * layout.hit_tokens
        assert again[0].cached_tokens == placement.expected_tokens(REPLICA) == cached
        assert total(running.transfers).reloaded_tokens == cached
        assert (await running.compare()).drift == 0
        vars(routed).clear()


def total(transfers: list[Transfers]) -> Transfers:
    return Transfers(
        sum(transfer.reloaded_tokens for transfer in transfers),
        sum(transfer.in_bytes for transfer in transfers),
        sum(transfer.in_s for transfer in transfers),
        sum(transfer.out_bytes for transfer in transfers),
        sum(transfer.out_s for transfer in transfers),
    )
