"""The simulated engine's host memory: its blocks, reloads and events."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
import pytest

from kvroute.blocks.cache_groups import HOST_GROUPS, group_fingerprint
from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import Load, TierFacts
from kvroute.replica import engines
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import (
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    KVEvent,
    Transfers,
)
from kvroute.replica.engines import start_engines
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.settings.replica import ReplicaSettings
from tests.support.chunks import streamed

SIZE = 32  # tokens in a block
BYTES = 1000  # size of a block
FAST = TierFacts(blocks=64, block_bytes=BYTES, bytes_per_s=1e8)  # 10 us for a block
SLOW = TierFacts(blocks=64, block_bytes=BYTES, bytes_per_s=1e4)  # 100 ms for a block
HARDLY_ANY_SPEED = {  # copying 6 blocks takes a minute; computing them takes longer
    "host": TierFacts(blocks=64, block_bytes=BYTES, bytes_per_s=100.0),
    "prefill_tokens_per_s": 2.0,
}

MakeEngine = Callable[..., SimulatedEngine]


@pytest.fixture
async def make() -> AsyncGenerator[MakeEngine, None]:
    """Yield a maker of engines with 8 blocks and a fast host tier; a block computes in 3.2 ms."""
    engines: list[SimulatedEngine] = []

    def make(**changes: Any) -> SimulatedEngine:
        usual = {
            "prefill_tokens_per_s": 10_000.0,
            "decode_step_s": 0.0,
            "decode_per_seq_s": 0.0,
            "capacity_blocks": 8,
            "host": FAST,
        }
        engines.append(SimulatedEngine(SimulatedConfig(**{**usual, **changes})))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


def request(prompt: Sequence[int], max_tokens: int = 1, **fields: Any) -> GenerateRequest:
    ids = np.array(prompt, dtype=np.uint32)
    return GenerateRequest("r", ids, max_tokens=max_tokens, **fields)


def of(number: int, blocks: int = 6) -> list[int]:
    """Return a prompt of full blocks and one more token."""
    return [number] * (blocks * SIZE + 1)


async def cached_tokens(engine: SimulatedEngine, request: GenerateRequest) -> int:
    return [chunk.cached_tokens async for chunk in streamed(engine.generate, request)][-1]


async def waits_for_a_copy(engine: SimulatedEngine) -> asyncio.Task[int]:
    """Return a request whose blocks are only in host memory."""
    wanted = request(of(1))
    table = engine._pool.table(wanted.token_ids, wanted.scope)
    assert engine._pool._host is not None
    engine._pool._host.store(table.hashes)
    waiting = asyncio.create_task(cached_tokens(engine, wanted))
    while not (engine.load().waiting and engine.load().used_blocks):
        await asyncio.sleep(0)
    return waiting


async def pending_events(engine: SimulatedEngine) -> list[KVEvent]:
    """Return the pending events."""
    async for batch in engine.events():
        return batch
    return []


async def test_blocks_that_the_gpu_has_evicted_are_reloaded(make: MakeEngine) -> None:
    engine = make()
    for number in (1, 2):
        assert await cached_tokens(engine, request(of(number))) == 0
    assert await cached_tokens(engine, request(of(1))) == 6 * SIZE


async def test_blocks_that_are_pinned_in_host_memory_are_always_reloaded(
    make: MakeEngine,
) -> None:
    engine = make(host=TierFacts(16, BYTES, FAST.bytes_per_s, pin_blocks=6))
    await cached_tokens(engine, request(of(1), pin="law", is_host_pin=True))
    for number in range(2, 9):
        await cached_tokens(engine, request(of(number)))
    assert (engine.host_pins, engine.pins) == ({"law": 6}, {})
    assert await cached_tokens(engine, request(of(1))) == 6 * SIZE
    with pytest.raises(PinRefusedError, match="6 that pins may take in host memory"):
        await cached_tokens(engine, request(of(2), pin="tax", is_host_pin=True))
    await engine.unpin("law")
    for number in range(2, 9):
        await cached_tokens(engine, request(of(number)))
    assert engine.host_pins == {}
    assert await cached_tokens(engine, request(of(1))) == 0


async def test_a_clear_ends_pins_in_host_memory(make: MakeEngine) -> None:
    engine = make(host=TierFacts(16, BYTES, FAST.bytes_per_s, pin_blocks=6))
    await cached_tokens(engine, request(of(1), pin="law", is_host_pin=True))
    assert await engine.reset_prefix_cache()
    assert engine.host_pins == {}
    await cached_tokens(engine, request(of(2), pin="tax", is_host_pin=True))


async def test_without_host_memory_only_cached_blocks_are_hits(
    make: MakeEngine,
) -> None:
    engine = make(host=None)
    for number in (1, 2):
        await cached_tokens(engine, request(of(number)))
    assert await cached_tokens(engine, request(of(1))) == SIZE
    assert engine.group_entries == (0,)
    assert engine.facts.host is None


async def test_blocks_that_are_computed_faster_are_not_copied(make: MakeEngine) -> None:
    engine = make(host=SLOW)
    for number in (1, 2):
        await cached_tokens(engine, request(of(number)))
    assert await cached_tokens(engine, request(of(1))) == SIZE


async def test_a_copy_is_cached_in_the_gpu_and_counted(make: MakeEngine) -> None:
    engine = make()
    for number in (1, 2):
        await cached_tokens(engine, request(of(number)))
    await pending_events(engine)
    await cached_tokens(engine, request(of(1)))
    events = await pending_events(engine)
    stored = [event for event in events if isinstance(event, BlockStored)]
    assert [(event.group, len(event.block_hashes)) for event in stored] == [(0, 5)]
    (moved,) = [event for event in events if isinstance(event, Transfers)]
    assert moved.reloaded_tokens == 5 * SIZE
    assert moved.in_bytes == 5 * BYTES
    assert moved.in_s == pytest.approx(5 * BYTES / FAST.bytes_per_s)


async def test_blocks_of_prompts_and_answers_are_copied_to_host_memory(make: MakeEngine) -> None:
    engine = make()
    await cached_tokens(engine, request(of(1, 2), max_tokens=40))
    events = await pending_events(engine)
    by_tier = Counter[int]()
    for event in events:
        if isinstance(event, BlockStored):
            by_tier[event.group] += len(event.block_hashes)
    assert by_tier == {0: 3, 1: 3}
    assert sum(event.out_bytes for event in events if isinstance(event, Transfers)) == 3 * BYTES


async def test_events_alone_show_which_blocks_both_tiers_hold(make: MakeEngine) -> None:
    engine = make(host=TierFacts(12, BYTES, FAST.bytes_per_s), max_batched_tokens=64)
    prompts = [of(number % 5, 2 + number % 3) for number in range(12)]
    await asyncio.gather(*(cached_tokens(engine, request(prompt, 40)) for prompt in prompts))
    await engine.emit_held()
    *events, held = await pending_events(engine)
    assert isinstance(held, BlocksHeld)
    copies: list[Counter[object]] = [Counter(), Counter()]
    for event in events:
        if isinstance(event, BlockStored):
            copies[event.group].update(event.block_hashes)
        elif isinstance(event, BlockRemoved):
            copies[event.group].subtract(event.block_hashes)
    assert [+copy for copy in copies] == [Counter(copy) for copy in held.copies]
    assert len(held.copies[1]) <= 12


async def test_the_block_table_publishes_host_blocks_as_such(make: MakeEngine) -> None:
    engine = make()
    for number in (1, 2):
        await cached_tokens(engine, request(of(number)))
    table = BlockTable(engine.group_entries)
    table.apply(await pending_events(engine), Changes())
    gpu = {hash_ for hash_ in engine._pool.copies() if isinstance(hash_, int)}
    host = {hash_ for hash_ in engine._pool._host or () if isinstance(hash_, int)}
    assert set(table.held()) == gpu | {group_fingerprint(hash_, HOST_GROUPS) for hash_ in host}
    assert len(host) == 12


async def test_clearing_the_cache_clears_both_tiers(make: MakeEngine) -> None:
    engine = make()
    for number in (1, 2):
        await cached_tokens(engine, request(of(number)))
    assert await engine.reset_prefix_cache()
    assert await cached_tokens(engine, request(of(1))) == 0


async def test_others_run_while_one_waits_for_its_copy(make: MakeEngine) -> None:
    engine = make(**HARDLY_ANY_SPEED)
    waiting = await waits_for_a_copy(engine)
    assert await cached_tokens(engine, request([7])) == 0
    assert engine.load().waiting == 1
    assert not await engine.reset_prefix_cache()
    waiting.cancel()


async def test_a_request_that_needs_the_same_blocks_waits_for_their_copy(make: MakeEngine) -> None:
    engine = make(capacity_blocks=16)
    for number in (1, 2, 3):
        await cached_tokens(engine, request(of(number)))
    await pending_events(engine)
    both = [request(of(1)), request([*of(1), 5, 5])]
    cached = await asyncio.gather(*(cached_tokens(engine, prompt) for prompt in both))
    assert cached == [6 * SIZE, 6 * SIZE]
    moved = [event for event in await pending_events(engine) if isinstance(event, Transfers)]
    assert sum(event.reloaded_tokens for event in moved) < 6 * SIZE


async def test_a_request_that_is_cancelled_during_its_copy_leaves_no_blocks(
    make: MakeEngine,
) -> None:
    engine = make(**HARDLY_ANY_SPEED)
    waiting = await waits_for_a_copy(engine)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert engine.load() == Load()
    assert await engine.reset_prefix_cache()


async def test_an_ended_sessions_blocks_are_evicted_first_in_host_memory(make: MakeEngine) -> None:
    engine = make(host=TierFacts(12, BYTES, FAST.bytes_per_s))
    for number in (1, 2):
        await cached_tokens(engine, request(of(number), keep=RetentionHint(session=number)))
    await engine.end_session(2)
    await cached_tokens(engine, request(of(3)))
    assert await cached_tokens(engine, request(of(1))) == 6 * SIZE


async def test_settings_determine_the_tier() -> None:
    settings = ReplicaSettings(
        served_model_name="m",
        redis_url="redis://unused",
        engine="simulated",
        host_cache_gb="4",
        data_parallel_size=2,
        simulated_host_gb_per_s=10.0,
    )
    block_bytes = settings.block_size * 131_072
    blocks = 2_000_000_000 // block_bytes
    pin_blocks = int(settings.pin_share * blocks)
    for engine in await start_engines(settings):
        assert engine.facts.host == TierFacts(blocks, block_bytes, 1e10, pin_blocks)
        assert engine.group_entries == (0, HOST_GROUPS)


async def test_a_share_is_relative_to_the_containers_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engines, "memory_bytes", lambda: 10_000_000_000)
    settings = ReplicaSettings(
        served_model_name="m",
        redis_url="redis://unused",
        engine="simulated",
        host_cache_gb="30%",
    )
    (engine,) = await start_engines(settings)
    assert engine.facts.host
    assert engine.facts.host.blocks == 3_000_000_000 // (settings.block_size * 131_072)
