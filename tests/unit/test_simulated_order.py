"""The simulated engine runs waiting requests in the routers' order."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.blocks.variants import SETUP_S
from kvroute.contract.generation import GenerateRequest
from kvroute.contract.records import Load
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from tests.support.answers import completion, end_of, ids_of
from tests.support.chunks import collected, streamed

ORDERS = st.lists(st.integers(-3, 3).map(lambda order: 100.0 * order), min_size=1, max_size=12)


@asynccontextmanager
async def started(**changes: Any) -> AsyncIterator[SimulatedEngine]:
    """Return an engine, by default without delays."""
    instant = {"prefill_tokens_per_s": 0.0, "decode_step_s": 0.0, "decode_per_seq_s": 0.0}
    engine = SimulatedEngine(SimulatedConfig(**{**instant, **changes}))
    yield engine
    load = engine.load()
    assert (load.running, load.waiting, load.used_blocks) == (0, 0, 0)
    await engine.close()


def request(
    number: int, order_s: float = 0.0, *, tokens: int = 10, lora: str = "", **fields: Any
) -> GenerateRequest:
    ids = np.full(tokens, number, np.uint32)
    call = completion(**{"max_tokens": 2, "temperature": 1.0, "seed": 1} | fields)
    return GenerateRequest(str(number), ids, variant=lora, call=call, order_s=order_s)


async def run(engine: SimulatedEngine, requests: Sequence[GenerateRequest]) -> list[int]:
    """Run all requests at the same time; return their numbers in the order of their ends."""
    ended: list[int] = []

    async def ask(each: GenerateRequest) -> None:
        async for _ in streamed(engine.generate, each):
            pass
        ended.append(int(each.request_id))

    await asyncio.gather(*map(ask, requests))
    return ended


def in_turn(orders: Sequence[float]) -> list[int]:
    return sorted(range(len(orders)), key=lambda number: (orders[number], number))


@given(ORDERS)
def test_requests_are_admitted_by_their_order_then_by_arrival(
    orders: list[float],
) -> None:
    async def all_of_them() -> list[int]:
        async with started(max_running=1) as engine:
            return await run(engine, [request(*each) for each in enumerate(orders)])

    assert asyncio.run(all_of_them()) == in_turn(orders)


@given(ORDERS, st.sets(st.integers(0, 11)))
def test_requests_that_leave_the_queue_do_not_change_the_order(
    orders: list[float], leaving: set[int]
) -> None:
    async def the_others() -> list[int]:
        async with started(max_running=1) as engine:
            requests = [request(*each, n=1 + each[0] % 2) for each in enumerate(orders)]
            lost = [asyncio.create_task(run(engine, [requests[n]])) for n in left]
            staying = [each for number, each in enumerate(requests) if number not in left]
            rest = asyncio.create_task(run(engine, staying))
            await asyncio.sleep(0)
            for task in lost:
                task.cancel()
            await asyncio.wait([*lost, rest])
            return await rest

    left = leaving & set(range(len(orders)))
    assert asyncio.run(the_others()) == [number for number in in_turn(orders) if number not in left]


async def answers(engine: SimulatedEngine, number: int, order_s: float, choices: int) -> list[int]:
    """Return the sorted tokens of all choices of a long answer."""
    asked = request(number, order_s, tokens=64, max_tokens=128, n=choices)
    chunks = await collected(engine.generate, asked)
    assert all(end_of(chunks, index) == "length" for index in range(choices))
    return sorted(ids_of(chunks))


@cache
def alone(number: int, choices: int) -> list[int]:
    """Return what a request is answered in an engine without others."""

    async def answered() -> list[int]:
        async with started() as engine:
            return await answers(engine, number, 0.0, choices)

    return asyncio.run(answered())


@settings(max_examples=25)
@given(ORDERS, st.integers(1, 3))
def test_whatever_the_order_preempted_choices_lose_no_token(
    orders: list[float], choices: int
) -> None:
    async def crowded() -> list[list[int]]:
        async with started(capacity_blocks=12) as engine:
            asked = (answers(engine, *each, choices) for each in enumerate(orders))
            return await asyncio.gather(*asked)

    assert asyncio.run(crowded()) == [alone(number, choices) for number in range(len(orders))]


@pytest.mark.parametrize(("first", "second"), [(0.0, 0.0), (-9.0, 9.0), (9.0, -9.0)])
async def test_the_last_in_order_is_preempted_when_blocks_run_out(
    first: float, second: float
) -> None:
    async with started(capacity_blocks=8) as engine:
        requests = [
            request(0, first, tokens=90, max_tokens=60),
            request(1, second, tokens=90, max_tokens=60),
        ]
        asking = asyncio.create_task(run(engine, requests[:1]))
        while not engine.load().running:
            await asyncio.sleep(0)
        later = asyncio.create_task(run(engine, requests[1:]))
        done, _ = await asyncio.wait([asking, later], return_when=asyncio.FIRST_COMPLETED)
        assert done == {asking if first <= second else later}
        await asyncio.wait([asking, later])


async def test_a_preempted_choice_waits_after_those_before_it_in_order() -> None:
    """A choice that has run before has no advantage: only its order counts."""
    async with started(capacity_blocks=8) as engine:
        requests = [
            request(0, 0.0, tokens=90, max_tokens=60),
            request(1, 9.0, tokens=90, max_tokens=60),
        ]
        asking = asyncio.create_task(run(engine, requests))
        while engine.load().running < 2:
            await asyncio.sleep(0)
        between = asyncio.create_task(run(engine, [request(2, 5.0, tokens=200)]))
        done, _ = await asyncio.wait([asking, between], return_when=asyncio.FIRST_COMPLETED)
        assert done == {between}
        assert await asking == [0, 1]


async def test_a_request_that_waits_for_an_adapters_place_delays_no_other() -> None:
    async with started(
        max_running=2, max_loras=1, lora_load_s=0.0, adapters=frozenset("ab")
    ) as engine:
        busy = request(0, -1.0, lora="a", max_tokens=200)
        requests = [busy, request(1, 0.0, lora="b"), request(2, 1.0), request(3, 2.0, lora="a")]
        assert await run(engine, requests) == [2, 3, 0, 1]


async def test_the_choices_of_a_request_have_its_order() -> None:
    async with started(max_running=1) as engine:
        requests = [request(0, 5.0), request(1, 0.0, n=3), replace(request(2), order_s=1.0)]
        assert await run(engine, requests) == [1, 2, 0]


async def test_a_request_that_leaves_removes_its_waiting_choices() -> None:
    async with started(max_running=1) as engine:
        other = asyncio.create_task(run(engine, [request(0, 5.0)]))
        async with aclosing(streamed(engine.generate, request(1, n=4, max_tokens=500))) as chunks:
            await anext(chunks)
            assert engine.load() == Load(running=1, waiting=4, used_blocks=1, setup_s=SETUP_S)
        assert await other == [0]
