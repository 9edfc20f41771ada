import asyncio
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer, models, pre_tokenizers

from kvroute.blocks.fingerprint import fingerprints, root
from kvroute.contract.generation import Chunk, EngineDeadError, GenerateRequest
from kvroute.contract.keep import RetentionHint
from kvroute.contract.records import Load
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventsLost,
    KVEvent,
)
from kvroute.replica.sim_engine import simulated
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from tests.support.answers import completion, end_of, logprobs_of
from tests.support.answers import ids_of as said
from tests.support.answers import text_of as text
from tests.support.chunks import collected, streamed
from tests.support.waiting import until

SIZE = 32  # tokens in a block

MakeEngine = Callable[..., SimulatedEngine]


@pytest.fixture
async def make() -> AsyncGenerator[MakeEngine, None]:
    """Yield a function that makes engines, by default without delays, and closes them later."""
    engines: list[SimulatedEngine] = []

    def make(tokenizer: str | None = None, **changes: Any) -> SimulatedEngine:
        instant = {"prefill_tokens_per_s": 0.0, "decode_step_s": 0.0, "decode_per_seq_s": 0.0}
        config = SimulatedConfig(**{**instant, **changes})
        engines.append(SimulatedEngine(config, tokenizer=tokenizer))
        return engines[-1]

    yield make
    for engine in engines:
        await engine.close()


def request(prompt: int | list[int], namespace: str = "", **fields: Any) -> GenerateRequest:
    """Return a greedy request; a number stands for a prompt of that many tokens, 0, 1, 2 ..."""
    token_ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    call = completion(**{"max_tokens": 8} | fields)
    return GenerateRequest("r", np.array(token_ids, dtype=np.uint32), namespace, call=call)


async def run(engine: SimulatedEngine, request: GenerateRequest) -> list[Chunk]:
    return await collected(engine.generate, request)


async def cached_tokens(engine: SimulatedEngine, request: GenerateRequest) -> int:
    counts = {chunk.cached_tokens for chunk in await run(engine, request)}
    assert len(counts) == 1
    return counts.pop()


async def pending_events(engine: SimulatedEngine) -> list[KVEvent]:
    """Return the pending events."""
    async for batch in engine.events():
        return batch
    return []


@pytest.mark.parametrize(("prompt", "cached"), [(100, 96), (96, 64), (97, 96), (32, 0), (5, 0)])
async def test_a_repeated_prompt_finds_its_full_blocks_but_never_its_last_token(
    make: MakeEngine, prompt: int, cached: int
) -> None:
    engine = make()
    assert await cached_tokens(engine, request(prompt)) == 0
    assert await cached_tokens(engine, request(prompt)) == cached


async def test_the_next_turn_of_a_chat_finds_the_answer_too(make: MakeEngine) -> None:
    engine = make()
    answer = said(await run(engine, request(64, max_tokens=40)))
    assert await cached_tokens(engine, request([*range(64), *answer, 7])) == 96


async def test_long_prompts_are_computed_in_pieces_that_are_cached_in_order(
    make: MakeEngine,
) -> None:
    engine = make(max_batched_tokens=64)
    await run(engine, request(200, max_tokens=1))
    stored = [event for event in await pending_events(engine) if isinstance(event, BlockStored)]
    assert [len(event.block_hashes) for event in stored] == [2, 2, 2]
    parent = root(model="simulated", block_size=SIZE)
    chain = fingerprints(np.arange(200, dtype=np.uint32), block_size=SIZE, parent=parent)
    assert [fingerprint for event in stored for fingerprint in event.fingerprints] == chain


async def test_equal_prompts_at_the_same_time_share_their_blocks(make: MakeEngine) -> None:
    engine = make()
    await asyncio.gather(*(run(engine, request(100)) for _ in range(3)))
    stored = [event for event in await pending_events(engine) if isinstance(event, BlockStored)]
    assert sum(len(event.block_hashes) for event in stored) == 3


async def test_namespaces_share_no_blocks(make: MakeEngine) -> None:
    engine = make()
    await run(engine, request(100, namespace="a"))
    assert await cached_tokens(engine, request(100, namespace="b")) == 0
    assert await cached_tokens(engine, request(100, namespace="a")) == 96


async def test_a_small_cache_evicts_the_oldest_prompt_and_reports_it(make: MakeEngine) -> None:
    engine = make(capacity_blocks=8)
    old, young = request([1] * 130), request([2] * 130)
    await run(engine, old)
    await run(engine, young)
    events = await pending_events(engine)
    assert sum(isinstance(event, BlockRemoved) for event in events) == 1
    assert await cached_tokens(engine, young) == 128
    assert await cached_tokens(engine, old) == 96


async def test_choices_that_outgrow_the_cache_are_preempted_and_still_finish(
    make: MakeEngine,
) -> None:
    engine = make(capacity_blocks=12)
    requests = [request([i] * 64, max_tokens=128) for i in range(6)]
    answers = await asyncio.gather(*(run(engine, request) for request in requests))
    alone = [await run(make(), request) for request in requests]
    assert [said(answer) for answer in answers] == [said(answer) for answer in alone]
    assert engine.load() == Load()


async def test_events_alone_show_which_blocks_are_cached(make: MakeEngine) -> None:
    engine = make(capacity_blocks=20)
    requests = [request([i % 4] * (40 + 9 * i), max_tokens=60) for i in range(20)]
    await asyncio.gather(*(run(engine, request) for request in requests))
    copies: Counter[object] = Counter()
    for event in await pending_events(engine):
        assert isinstance(event, BlockStored | BlockRemoved)
        change = copies.update if isinstance(event, BlockStored) else copies.subtract
        change(event.block_hashes)
    assert +copies == engine._pool.copies()


async def test_blocks_of_an_ended_session_are_evicted_first(make: MakeEngine) -> None:
    engine = make(capacity_blocks=10)
    for session in (1, 2):
        prompt = request([session] * 4 * SIZE, max_tokens=1)
        await run(engine, replace(prompt, keep=RetentionHint(session=session)))
    await engine.end_session(2)
    await run(engine, request([3] * 5 * SIZE, max_tokens=1))
    assert await cached_tokens(engine, request([1] * 4 * SIZE + [9])) == 4 * SIZE


async def test_closing_a_stream_frees_its_blocks_at_once(make: MakeEngine) -> None:
    engine = make(decode_step_s=0.001)
    stream = streamed(engine.generate, request(100, max_tokens=5000))
    await anext(stream)
    assert engine.load() == Load(running=1, waiting=0, used_blocks=4)
    await stream.aclose()
    assert engine.load() == Load()


async def test_cancelling_a_reader_aborts_its_request_even_in_the_queue(make: MakeEngine) -> None:
    engine = make(max_running=1, decode_step_s=0.001)
    tasks = [asyncio.create_task(run(engine, request(50, max_tokens=5000))) for _ in range(2)]
    await until(lambda: (engine.load().running, engine.load().waiting) == (1, 1))
    for task in reversed(tasks):
        task.cancel()
    await asyncio.wait(tasks)
    assert engine.load() == Load()


async def test_two_hundred_streams_at_once_all_finish(make: MakeEngine) -> None:
    engine = make()
    requests = [request([i, *range(500)], max_tokens=50) for i in range(200)]
    answers = await asyncio.gather(*(run(engine, request) for request in requests))
    assert all(len(said(answer)) == 50 for answer in answers)
    assert all(end_of(answer) == "length" for answer in answers)


async def test_an_answer_that_is_resumed_on_another_engine_continues_identically(
    make: MakeEngine,
) -> None:
    whole = said(await run(make(), request(70, max_tokens=40)))
    prompt = [*range(70), *whole[:13]]
    rest = await run(make(), request(prompt, max_tokens=27, namespace="elsewhere"))
    assert whole[13:] == said(rest)


async def test_sampled_answers_differ_by_seed(make: MakeEngine) -> None:
    engine = make()
    answers = [said(await run(engine, request(9, temperature=1.0, seed=s))) for s in (1, 2, 1)]
    assert answers[0] == answers[2] != answers[1]


async def test_text_ends_before_a_stop_string_that_spans_tokens(make: MakeEngine) -> None:
    engine = make()
    whole = text(await run(engine, request(10)))
    stop = whole[8:15]
    chunks = await run(engine, request(10, stop=["never", stop]))
    assert text(chunks) == whole[: whole.index(stop)]
    assert end_of(chunks) == "stop"
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_text_held_back_for_a_stop_string_is_sent_in_the_end(make: MakeEngine) -> None:
    engine = make()
    whole = text(await run(engine, request(10)))
    chunks = await run(engine, request(10, stop=whole[-4:] + "!"))
    assert text(chunks) == whole
    assert end_of(chunks) == "length"


async def test_stop_strings_are_ignored_before_min_tokens(make: MakeEngine) -> None:
    chunks = await run(make(), request(10, stop=" ", min_tokens=5))
    assert len(said(chunks)) == 6
    assert text(chunks).count(" ") == 5


async def test_two_choices_differ_and_compute_their_prompt_once(make: MakeEngine) -> None:
    engine = make()
    chunks = await run(engine, request(100, n=2, max_tokens=5, temperature=1))
    assert len(said(chunks)) == 10
    assert text(chunks, 0) != text(chunks, 1)
    assert [end_of(chunks, index) for index in (0, 1)] == ["length"] * 2
    assert (
        sum(len(e.block_hashes) for e in await pending_events(engine) if isinstance(e, BlockStored))
        == 3
    )


async def test_without_prefix_caching_there_are_no_cached_blocks_and_no_events(
    make: MakeEngine,
) -> None:
    engine = make(prefix_caching=False)
    for _ in range(2):
        assert await cached_tokens(engine, request(100)) == 0
    assert await engine.reset_prefix_cache()
    assert engine._events == []


async def test_a_reset_clears_the_cache_and_reports_it_at_once(make: MakeEngine) -> None:
    engine = make()
    await run(engine, request(100))
    assert await engine.reset_prefix_cache()
    assert (await pending_events(engine))[-1] == AllBlocksCleared()
    assert await cached_tokens(engine, request(100)) == 0


async def test_a_reset_is_refused_while_blocks_are_held(make: MakeEngine) -> None:
    engine = make(decode_step_s=0.001)
    stream = streamed(engine.generate, request(100, max_tokens=5000))
    await anext(stream)
    assert not await engine.reset_prefix_cache()
    await stream.aclose()
    assert await cached_tokens(engine, request(100)) == 96


async def test_events_nobody_reads_are_dropped_and_reported_lost(
    make: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulated, "MAX_WAITING_EVENTS", 3)
    engine = make()
    for i in range(4):
        await run(engine, request([i] * 40, max_tokens=1))
    assert await pending_events(engine) == [EventsLost()]


async def test_logprobs_have_the_requested_number_of_alternatives(make: MakeEngine) -> None:
    chunks = await run(make(), request(5, max_tokens=1, logprobs=3))
    ((token, top),) = logprobs_of(chunks)
    assert token == text(chunks) == next(iter(top))
    assert len(top) == 3


async def test_an_answer_ends_at_the_context_length(make: MakeEngine) -> None:
    chunks = await run(make(max_model_len=64), request(60, max_tokens=4))
    assert len(said(chunks)) == 4
    assert end_of(chunks) == "length"


@pytest.mark.parametrize(
    ("prompt", "message"), [(0, "0 tokens"), (8192, "1 to 8191"), (300, "smaller max_tokens")]
)
async def test_requests_that_can_never_run_are_refused(
    make: MakeEngine, prompt: int, message: str
) -> None:
    unread = GenerateRequest("r", np.arange(prompt, dtype=np.uint32))
    with pytest.raises(ValueError, match=message):
        await run(make(capacity_blocks=8), unread)


@pytest.mark.parametrize(("attention_tokens", "prefill_s"), [(1e9, 0.1), (100.0, 0.2)])
async def test_steps_take_the_modelled_time(
    make: MakeEngine, attention_tokens: float, prefill_s: float
) -> None:
    engine = make(
        prefill_tokens_per_s=2000.0, attention_tokens=attention_tokens, decode_step_s=0.002
    )
    decode_s = 0.1  # 51 steps of 2 ms
    late_s = math.inf
    for number in range(10):  # on a busy machine, some steps take longer
        start_s = time.perf_counter()
        await run(engine, request([number, *range(199)], max_tokens=51))
        late_s = min(late_s, time.perf_counter() - start_s - prefill_s - decode_s)
        assert late_s > 0
        if late_s < 0.3:
            return
    raise AssertionError(late_s)


async def test_a_closed_engine_ends_its_streams_and_rejects_requests(make: MakeEngine) -> None:
    engine = make(decode_step_s=0.001)
    stream = streamed(engine.generate, request(10, max_tokens=5000))
    await anext(stream)
    await engine.check()
    await engine.close()
    with pytest.raises(EngineDeadError):
        [_ async for _ in stream]
    with pytest.raises(EngineDeadError):
        await run(engine, request(10))
    with pytest.raises(EngineDeadError):
        await engine.check()


async def test_the_text_is_tokenised_to_the_generated_tokens(
    make: MakeEngine, tmp_path: Path
) -> None:
    words = {"a": 0, "Ġapple": 1, "Ġpear": 2, "ĠPear": 3, "pear": 4, "Ġ7": 5, "Ġfig": 6}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="a"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    chunks = await run(make(str(tmp_path)), request(10, max_tokens=50))
    assert set(said(chunks)) == {1, 2, 6}
    assert tokenizer.encode(text(chunks)).ids == said(chunks)


def test_a_missing_tokenizer_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
        SimulatedEngine(SimulatedConfig(), tokenizer="/no/such/folder")
