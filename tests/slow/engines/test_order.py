"""Requests that wait in an engine start in the routers' order: each engine takes one at a time."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.generation import GenerateRequest
from tests.support.chunks import streamed
from tests.support.engines import SHALLOW_CACHE_MB, Running, prompt_of, request_of, shallow_model
from tests.support.engines import started as started_engine
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["simulated", "vllm"])
async def narrow(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Running]:
    """An engine that runs one request at a time."""
    folder: Path = tmp_path_factory.mktemp("narrow")
    async with started_engine(
        request.param,
        model=str(shallow_model(folder / "model")),
        max_model_len=2560,
        kv_cache_memory_mb=SHALLOW_CACHE_MB,
        simulated_blocks=90,
        max_num_seqs=1,
    ) as running:
        yield running


async def order_of(running: Running, waiting: Mapping[str, GenerateRequest]) -> list[str]:
    """How these requests end that come, one by one, while the engine is busy."""
    ended: list[str] = []

    async def ask(name: str, request: GenerateRequest) -> None:
        await running.run(request)
        ended.append(name)

    def is_waiting(requests: int) -> bool:
        return running.engine.load().waiting == requests

    busy = replace(request_of(prompt_of(40, seed=1), max_tokens=2400), request_id="busy")
    engine = running.engine
    async with asyncio.TaskGroup() as tasks, aclosing(streamed(engine.generate, busy)) as chunks:
        await anext(chunks)
        for number, (name, request) in enumerate(waiting.items(), start=1):
            tasks.create_task(ask(name, request))
            await until(partial(is_waiting, number))
    return ended


def asked(order_s: float = 0.0, **fields: Any) -> GenerateRequest:
    return replace(request_of(prompt_of(40, seed=2), max_tokens=2, **fields), order_s=order_s)


async def test_the_smallest_order_is_answered_first_whenever_it_came(narrow: Running) -> None:
    orders = {"last": 100.0, "second": 0.0, "third": 50.0, "first": -100.0}
    waiting = {name: asked(order_s) for name, order_s in orders.items()}
    assert await order_of(narrow, waiting) == ["first", "second", "third", "last"]


async def test_equal_orders_are_answered_as_they_came(narrow: Running) -> None:
    assert await order_of(narrow, {name: asked() for name in "abcd"}) == [*"abcd"]


async def test_who_has_waited_elsewhere_does_not_wait_again(narrow: Running) -> None:
    """A second of order is a second of time, whatever came meanwhile."""
    waiting = {"came first": asked(60.0), "has waited": asked(-60.0), "came last": asked(61.0)}
    assert await order_of(narrow, waiting) == ["has waited", "came first", "came last"]


async def test_what_nobody_reads_has_its_turn_too(narrow: Running) -> None:
    unread = GenerateRequest("", np.array(prompt_of(40, seed=3), np.uint32), order_s=-1.0)
    assert await order_of(narrow, {"late": asked(), "early": unread}) == ["early", "late"]


async def test_a_clients_own_priority_moves_nothing(narrow: Running) -> None:
    if narrow.engine.facts.engine == "simulated":
        pytest.skip("vLLM's field of a body")
    waiting = {"first": asked(), "second": asked(priority=-(2**62)), "third": asked()}
    assert await order_of(narrow, waiting) == ["first", "second", "third"]
