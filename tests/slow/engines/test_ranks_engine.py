"""vLLM with two data parallel ranks: each is an engine with a cache of its own."""

import asyncio
import multiprocessing
import signal
from collections.abc import AsyncIterator
from typing import Any

import psutil
import pytest
import pytest_asyncio
from msgspec.structs import replace

from kvroute.contract.adapters import Adapter
from kvroute.contract.generation import EngineDeadError
from tests.support.adapters import write_adapter
from tests.support.answers import ids_of, text_of
from tests.support.engines import (
    BLOCK,
    LAYERS,
    SHALLOW_CACHE_MB,
    WIDTH,
    Running,
    prompt_of,
    request_of,
    shallow_model,
    started_ranks,
)
from tests.support.waiting import until

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own
]

Ranks = list[Running]
LORA = "sql"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def ranks(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ranks]:
    """Of a shallow model in a small cache, with an adapter."""
    folder = tmp_path_factory.mktemp("ranks")
    write_adapter(folder / LORA, seed=1, layers=LAYERS, width=WIDTH, strength=4.0)
    async with started_ranks(
        "vllm",
        model=str(shallow_model(folder / "model")),
        kv_cache_memory_mb=SHALLOW_CACHE_MB,
        adapters=(Adapter(name=LORA, path=str(folder / LORA)),),
        data_parallel_size=2,
    ) as ranks:
        yield ranks


async def test_each_rank_says_how_much_its_own_cache_holds(ranks: Ranks) -> None:
    first, second = (running.engine.facts for running in ranks)
    together: Any = ranks[0].engine._llm.vllm_config.cache_config  # type: ignore[attr-defined]
    assert first == second
    assert first.capacity_blocks + second.capacity_blocks == together.num_gpu_blocks - 2


async def test_each_rank_has_cached_what_it_has_computed_itself(ranks: Ranks) -> None:
    prompt = prompt_of(200, seed=1)
    found = [await ranks[rank].ask(prompt) for rank in (0, 1, 0, 1)]
    assert [chunks[0].cached_tokens for chunks in found] == [0, 0, 192, 192]
    assert len({tuple(ids_of(chunks)) for chunks in found}) == 1
    assert len({text_of(chunks) for chunks in found}) == 1


async def test_the_events_of_a_rank_reach_its_own_table_only(ranks: Ranks) -> None:
    for running in ranks:
        assert (await running.compare()).drift == 0
    before = [set(running.table.held()) for running in ranks]
    await ranks[1].ask(prompt_of(160, seed=2))
    assert (await ranks[1].compare()).drift == 0
    assert len(set(ranks[1].table.held()) - before[1]) == 5
    assert (await ranks[0].compare()).drift == 0
    assert set(ranks[0].table.held()) == before[0]


async def test_no_rank_holds_anything_but_what_its_events_told(ranks: Ranks) -> None:
    """Each of them gets more than its cache holds."""
    await asyncio.gather(
        *(running.flood(range(10 * rank, 10 * rank + 10)) for rank, running in enumerate(ranks))
    )
    for running in ranks:
        comparison = await running.compare()
        assert comparison.drift == 0
        assert 10 < comparison.blocks <= running.engine.facts.capacity_blocks


async def test_a_pin_of_one_rank_holds_nothing_in_the_other(ranks: Ranks) -> None:
    prompt = prompt_of(4 * BLOCK, seed=3)
    await ranks[1].pin("law", prompt)
    for running in ranks:
        await running.flood(range(30, 40))
    assert [dict(running.engine.pins) for running in ranks] == [{}, {"law": 4}]
    assert [await running.cached_tokens(prompt) for running in ranks] == [0, 4 * BLOCK]
    assert ranks[1].engine.load().used_blocks > 0
    await ranks[1].engine.unpin("law")
    assert ranks[1].engine.load().used_blocks == 0


async def test_what_cannot_name_a_rank_reaches_it_all_the_same(ranks: Ranks) -> None:
    """As embeddings do, for which vLLM itself would choose."""
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from kvroute.replica.vllm_engine.core.rank_core import AtRank

    engine: Any = ranks[1].engine
    at_rank, prompt = AtRank(engine._llm, 1), prompt_of(100, seed=7)
    for _ in range(2):
        async for _ in AsyncLLM.generate(at_rank, tokens_input(prompt), SamplingParams(), "r"):
            pass
    assert [await running.cached_tokens(prompt) for running in ranks] == [0, 96]


async def test_an_adapter_is_loaded_by_the_ranks_that_need_it(ranks: Ranks) -> None:
    request = request_of(prompt_of(100, seed=6))
    without = await ranks[1].run(request)
    adapted = await ranks[1].run(replace(request, variant=LORA))
    assert ids_of(adapted) != ids_of(without)
    assert [running.engine.load().variants for running in ranks] == [(), (LORA,)]
    assert ids_of(await ranks[0].run(replace(request, variant=LORA))) == ids_of(adapted)
    assert [running.engine.load().variants for running in ranks] == [(LORA,), (LORA,)]
    for running in ranks:
        assert (await running.compare()).drift == 0


async def test_a_rank_is_cleared_alone(ranks: Ranks) -> None:
    for running in ranks:
        await running.ask(prompt_of(100, seed=4))
    assert await ranks[1].engine.reset_prefix_cache()
    await until(lambda: len(ranks[1].table) == 0)
    assert len(ranks[0].table) > 0
    assert (await ranks[0].compare()).drift == 0


async def test_with_one_ranks_process_both_are_dead(ranks: Ranks) -> None:
    """As the last test here: nothing runs after it."""
    processes = psutil.Process().children(recursive=True)
    (victim,) = [process for process in processes if "EngineCore_DP1" in process.name()]

    async def ask_for_ever() -> None:
        while True:
            await ranks[0].ask(prompt_of(100, seed=5))

    victim.kill()
    with pytest.raises(EngineDeadError):
        await asyncio.wait_for(ask_for_ever(), 30)
    for rank in ranks:
        with pytest.raises(EngineDeadError):
            await rank.engine.check()


def coordinate(told: Any) -> None:
    """A replica's process: it starts vLLM's coordinator, tells its pid, and hangs."""
    from vllm.config import ParallelConfig
    from vllm.v1.engine.coordinator import DPCoordinator

    from kvroute.replica.vllm_engine.replaced import BEFORE_START, apply

    apply(BEFORE_START)
    coordinator = DPCoordinator(ParallelConfig(data_parallel_size=2))
    told.send(coordinator.proc.pid)
    signal.pause()


async def test_the_coordinator_of_a_killed_replica_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROCESSING_METHOD", "spawn")
    spawning = multiprocessing.get_context("spawn")
    hearing, told = spawning.Pipe(duplex=False)
    replica = spawning.Process(target=coordinate, args=(told,))
    replica.start()
    told.close()  # so that a replica that ends without a word is heard
    try:
        pid = await asyncio.to_thread(hearing.recv)
        coordinator = psutil.Process(pid)
        assert coordinator.is_running()
    finally:
        replica.kill()
        replica.join()
    await until(lambda: not psutil.pid_exists(pid) or coordinator.status() == psutil.STATUS_ZOMBIE)
