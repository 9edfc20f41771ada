"""What every engine does: each behaviour is asked of the simulated engine and of vLLM."""

import asyncio
import contextlib

import numpy as np
import pytest
import zmq.asyncio

from kvroute.blocks.fingerprint import Fingerprint, fingerprints, root
from kvroute.contract.generation import GenerateRequest, PinRefusedError
from kvroute.replica.engine.event_batches import receive_batch
from kvroute.replica.vllm_engine.core import subscription
from tests.support.answers import data_of, end_of, ids_of, logprobs_of, status_of, text_of
from tests.support.chunks import streamed
from tests.support.engines import BLOCK, Running, prompt_of, request_of, rest_of
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


def chain_of(prompt: list[int], namespace: str = "") -> list[Fingerprint]:
    parent = root(model="m", block_size=BLOCK, namespace=namespace)
    return fingerprints(np.array(prompt, np.uint32), block_size=BLOCK, parent=parent)


async def test_an_engine_says_what_it_is(running: Running) -> None:
    facts = running.engine.facts
    assert facts.block_size == BLOCK
    assert facts.capacity_blocks > facts.max_model_len / BLOCK
    assert facts.prefill_tokens_per_s > 0
    assert facts.max_num_seqs > 0
    await running.engine.check()


async def test_the_second_time_all_full_blocks_are_cached_and_the_answer_is_the_same(
    running: Running,
) -> None:
    prompt = prompt_of(500, seed=1)
    cold, cached = await running.ask(prompt), await running.ask(prompt)
    assert {chunk.cached_tokens for chunk in cold} == {0}
    assert {chunk.cached_tokens for chunk in cached} == {480}
    assert ids_of(cold) == ids_of(cached)
    assert text_of(cold) == text_of(cached)


async def test_the_answer_to_a_long_prompt_is_the_same_however_much_of_it_is_cached(
    running: Running,
) -> None:
    prompt = prompt_of(990, seed=45)
    cold = await running.ask(prompt, max_tokens=24)
    for blocks in (30, 16, 3):
        await running.engine.reset_prefix_cache()
        await running.ask(prompt[: blocks * BLOCK])
        warm = await running.ask(prompt, max_tokens=24)
        assert (cold[0].cached_tokens, warm[0].cached_tokens) == (0, blocks * BLOCK)
        assert ids_of(warm) == ids_of(cold)


async def test_a_prompt_of_whole_blocks_computes_its_last_block_again(running: Running) -> None:
    prompt = prompt_of(4 * BLOCK, seed=2)
    await running.ask(prompt)
    assert (await running.ask(prompt))[0].cached_tokens == 3 * BLOCK


async def test_a_longer_prompt_takes_the_blocks_of_its_beginning(running: Running) -> None:
    prompt = prompt_of(200, seed=3)
    await running.ask(prompt)
    assert (await running.ask(prompt + prompt_of(100, seed=4)))[0].cached_tokens == 192


async def test_the_events_tell_exactly_the_fingerprints_of_prompt_and_answer(
    running: Running,
) -> None:
    prompt = prompt_of(100, seed=5)
    answer = await running.ask(prompt, max_tokens=64)
    computed = prompt + ids_of(answer)[:-1]  # the last token's KV is never computed
    await until(lambda: set(chain_of(computed)) <= set(running.table.held()))
    other = prompt_of(100, seed=6)
    assert not set(chain_of(other)) & set(running.table.held())


async def test_namespaces_share_no_blocks(running: Running) -> None:
    prompt = prompt_of(200, seed=7)
    await running.ask(prompt)
    assert (await running.ask(prompt, namespace="tenant"))[0].cached_tokens == 0
    assert (await running.ask(prompt, namespace="tenant"))[0].cached_tokens == 192
    await until(lambda: set(chain_of(prompt, "tenant")) <= set(running.table.held()))


async def test_evicted_blocks_leave_the_table(running: Running) -> None:
    first = prompt_of(300, seed=8)
    await running.ask(first)
    await until(lambda: chain_of(first)[0] in running.table.held())
    for seed in range(100, 106):
        await running.ask(prompt_of(750, seed))
    await until(lambda: chain_of(first)[-1] not in running.table.held())
    assert len(running.table) <= running.engine.facts.capacity_blocks


async def test_an_engine_holds_what_its_events_told_whatever_it_is_doing(running: Running) -> None:
    prompts = [prompt_of(900, seed) for seed in (20, 21)]
    asking = [asyncio.create_task(running.ask(prompt, max_tokens=100)) for prompt in prompts]
    while not all(task.done() for task in asking):
        assert (await running.compare()).drift == 0
    assert (await running.compare()).blocks == len(running.table) > 50


async def test_a_batch_of_events_that_was_lost_is_told_again(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    if running.engine.facts.engine == "simulated":
        pytest.skip("its events are handed over within one process")
    lost = list[int]()

    async def lossy(socket: zmq.asyncio.Socket, wait_s: float) -> tuple[int, bytes] | None:
        batch = await receive_batch(socket, wait_s)
        while batch and wait_s == subscription.QUIET_S and batch[0] % 3:
            lost.append(batch[0])
            batch = await receive_batch(socket, wait_s)
        return batch

    await running.compare()
    monkeypatch.setattr(subscription, "receive_batch", lossy)
    for seed in range(22, 28):
        await running.ask(prompt_of(750, seed))
    await running.ask(prompt_of(100, seed=28))
    assert lost
    monkeypatch.undo()
    assert (await running.compare()).drift == 0


async def test_a_reset_is_told_at_once(running: Running) -> None:
    await running.ask(prompt_of(100, seed=9))
    await until(lambda: len(running.table) > 0)
    assert await running.engine.reset_prefix_cache()
    await until(lambda: len(running.table) == 0)


async def test_what_goes_round_just_beyond_the_cache_would_be_found_in_a_larger_one(
    running: Running,
) -> None:
    await running.engine.reset_prefix_cache()
    prompts = [prompt_of(23 * BLOCK, seed) for seed in range(600, 700)]
    around = prompts[: round(1.38 * running.engine.facts.capacity_blocks / 24)]
    before = running.ghosts.hit_tokens
    first, second = [[await running.cached_tokens(each) for each in around] for _ in range(2)]
    await running.compare()  # all events have come
    gained = {size: tokens - before[size] for size, tokens in running.ghosts.hit_tokens.items()}
    assert not any(first + second)
    assert gained["1.25"] < gained["1.5"] == gained["2"] == len(around) * 23 * BLOCK


async def test_no_flood_evicts_what_is_pinned(running: Running) -> None:
    pinned, other = prompt_of(20 * BLOCK, seed=30), prompt_of(20 * BLOCK, seed=31)
    await running.pin("a", pinned)
    assert await running.cached_tokens(other) == 0
    await running.flood(range(200, 212))  # three times the KV cache
    assert await running.cached_tokens(other) == 0
    assert await running.cached_tokens(pinned) == 20 * BLOCK
    await running.engine.unpin("a")
    await running.flood(range(212, 218))
    assert await running.cached_tokens(pinned) == 0


async def test_a_pin_grows_in_the_place_of_what_had_its_name(running: Running) -> None:
    prompt = prompt_of(10 * BLOCK, seed=32)
    for blocks in (3, 10):
        await running.pin("a", prompt[: blocks * BLOCK])
        assert running.engine.pins == {"a": blocks}
        assert running.engine.load().used_blocks == blocks
    await running.engine.unpin("a")
    assert running.engine.pins == {}
    assert running.engine.load().used_blocks == 0


async def test_a_block_stays_while_one_of_two_pins_holds_it(running: Running) -> None:
    prompt = prompt_of(10 * BLOCK, seed=33)
    await running.pin("a", prompt)
    await running.pin("b", prompt[: 4 * BLOCK])
    await running.engine.unpin("a")
    assert running.engine.load().used_blocks == 4
    await running.flood(range(220, 226))
    assert await running.cached_tokens(prompt) == 4 * BLOCK
    await running.engine.unpin("b")


async def test_a_pin_beyond_the_budget_is_refused_and_the_others_stay(running: Running) -> None:
    budget = running.engine.facts.pin_blocks
    assert 0 < budget < running.engine.facts.capacity_blocks / 3
    await running.pin("a", prompt_of((budget - 10) * BLOCK, seed=34))
    with pytest.raises(PinRefusedError, match="b needs 11 KV blocks, but only 10 of the 2"):
        await running.pin("b", prompt_of(11 * BLOCK, seed=35))
    await running.pin("b", prompt_of(10 * BLOCK, seed=35))
    assert running.engine.pins == {"a": budget - 10, "b": 10}
    assert len(ids_of(await running.ask(prompt_of(1016, seed=36)))) == 8  # the longest still runs
    await running.engine.unpin("a")
    await running.engine.unpin("b")


async def test_a_pin_whose_caller_leaves_is_none(running: Running) -> None:
    prompt = np.array(prompt_of(100, seed=37), np.uint32)
    request = GenerateRequest("leaver", prompt, pin="a", max_tokens=900)
    async with contextlib.aclosing(streamed(running.engine.generate, request)) as chunks:
        await anext(chunks)
    await running.ask(prompt_of(40, seed=38))  # a step for the statistics
    assert running.engine.pins == {}
    await until(lambda: running.engine.load().used_blocks == 0)


async def test_pins_go_with_the_cache_but_not_when_it_has_to_stay(running: Running) -> None:
    prompt = prompt_of(4 * BLOCK, seed=39)
    await running.pin("a", prompt)
    request = request_of(prompt_of(40, seed=40), max_tokens=900)
    async with contextlib.aclosing(streamed(running.engine.generate, request)) as chunks:
        await anext(chunks)
        assert not await running.engine.reset_prefix_cache()
        assert running.engine.pins == {"a": 4}
    await running.ask(prompt_of(40, seed=41))
    assert await running.engine.reset_prefix_cache()
    assert running.engine.pins == {}
    assert await running.cached_tokens(prompt) == 0


async def test_a_pin_serves_its_own_namespace_only(running: Running) -> None:
    prompt = prompt_of(4 * BLOCK, seed=42)
    await running.pin("a", prompt)
    assert (await running.ask([*prompt, 0], namespace="tenant"))[0].cached_tokens == 0
    assert await running.cached_tokens(prompt) == 4 * BLOCK
    await running.engine.unpin("a")


async def test_an_answer_is_the_same_whether_its_beginning_is_pinned_or_not(
    running: Running,
) -> None:
    prefix, rest = prompt_of(23 * BLOCK, seed=43), prompt_of(50, seed=44)
    cold = await running.ask(prefix + rest)
    await running.engine.reset_prefix_cache()
    await running.pin("a", prefix)
    pinned = await running.ask(prefix + rest)
    assert (cold[0].cached_tokens, pinned[0].cached_tokens) == (0, 23 * BLOCK)
    assert ids_of(cold) == ids_of(pinned)
    await running.engine.unpin("a")


async def test_a_caller_that_leaves_frees_the_engine(running: Running) -> None:
    request = request_of(prompt_of(100, seed=10), max_tokens=900)
    async with contextlib.aclosing(streamed(running.engine.generate, request)) as chunks:
        await anext(chunks)
    await running.ask(prompt_of(40, seed=11))  # a step for the statistics
    await until(lambda: running.engine.load().running == 0)


async def test_an_engine_names_the_requests_that_it_has_not_started(running: Running) -> None:
    """Two or three of these prompts fit into the cache; the others wait."""
    requests = [request_of(prompt_of(900, seed=seed), max_tokens=100) for seed in range(30, 34)]
    ids = [f"r{running.requests + number}" for number in (1, 2, 3, 4)]
    asked = [asyncio.create_task(running.run(request)) for request in requests]
    async with asyncio.timeout(60):
        while not 0 < len(unstarted := await running.engine.unstarted([*ids, "another"])) <= 2:
            await asyncio.sleep(0.001)
    assert unstarted == ids[-len(unstarted) :]
    assert [len(ids_of(chunks)) for chunks in await asyncio.gather(*asked)] == [100] * 4
    assert await running.engine.unstarted(ids) == []


async def test_a_stop_string_ends_the_answer_before_itself(running: Running) -> None:
    prompt = prompt_of(60, seed=12)
    whole = text_of(await running.ask(prompt, max_tokens=24))
    stop = whole[len(whole) // 2 :][:4]
    chunks = await running.ask(prompt, max_tokens=24, stop=stop)
    assert text_of(chunks) == whole[: whole.index(stop)]
    assert end_of(chunks) == "stop"


async def test_the_token_limit_ends_the_answer(running: Running) -> None:
    chunks = await running.ask(prompt_of(40, seed=13))
    assert len(ids_of(chunks)) == 8
    assert end_of(chunks) == "length"
    assert [chunk.is_last for chunk in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_several_choices_come_under_their_numbers(running: Running) -> None:
    prompt = prompt_of(40, seed=14)
    chunks = await running.ask(prompt, max_tokens=5, n=3, temperature=1.0, seed=3)
    assert [end_of(chunks, index) for index in range(3)] == ["length"] * 3
    assert len(ids_of(chunks)) == 15


async def test_logprobs_come_with_each_token(running: Running) -> None:
    chunks = await running.ask(prompt_of(40, seed=15), max_tokens=4, logprobs=3)
    logprobs = logprobs_of(chunks)
    assert len(logprobs) == len(ids_of(chunks)) == 4
    for token, alternatives in logprobs:
        assert max(alternatives, key=alternatives.__getitem__) == token


async def test_a_seeded_answer_goes_on_the_same_way_each_time(running: Running) -> None:
    request = request_of(prompt_of(40, seed=18), max_tokens=24, temperature=1.0, seed=5)
    cut = rest_of(request, (await running.run(request))[:2])
    first, second = await running.run(cut), await running.run(cut)
    assert ids_of(first) == ids_of(second)
    assert len(ids_of(first)) == 24 - cut.answered


async def test_what_nobody_reads_is_generated_too(running: Running) -> None:
    prompt = prompt_of(100, seed=19)
    request = GenerateRequest("", np.array(prompt, np.uint32), max_tokens=3)
    assert len(ids_of(await running.run(request))) == 3
    assert (await running.run(request))[0].cached_tokens == 96


async def test_an_impossible_request_is_refused_and_the_next_one_served(running: Running) -> None:
    (refused,) = await running.ask(prompt_of(1100, seed=16))
    assert status_of([refused]) == 400
    assert b"1100" in data_of([refused])
    assert ids_of(await running.ask(prompt_of(40, seed=17)))
