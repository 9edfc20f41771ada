"""A request that a replica's engine does not start is sent to another replica, or refused.

Placement avoids such replicas.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from kvroute.contract.generation import Chunk, GenerateRequest, decode_ids, encode_ids
from kvroute.contract.records import Load, ReplicaRecord
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.api.errors import ApiError
from kvroute.router.connections.links import HungError, UnansweredError
from kvroute.router.dispatch.generation import Generation
from kvroute.router.placement.attempts import Attempt, RequestContext, RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.waits import Urgency
from tests.support.answers import completion
from tests.support.waiting import until
from tests.support.wired import Wired, dispatcher_of

# A cache of 8 blocks: one answer of 150 tokens to a prompt of 100 tokens needs all of them.
SMALL = SimulatedConfig(
    prefill_tokens_per_s=1e6, decode_step_s=0.02, capacity_blocks=8, block_size=32
)
PROMPT = np.arange(100, dtype=np.uint32)


class Ends(RequestObserver):
    """Records where attempts ended, and how."""

    def __init__(self) -> None:
        self.attempts: list[tuple[str, str | None]] = []
        self.refusals: list[str] = []

    def ended(self, attempt: Attempt) -> None:
        self.attempts.append((attempt.replica_id, attempt.outcome))

    def rejected(self, priority: str, refusal: str) -> None:
        self.refusals.append(refusal)


class Cluster:
    """Engines with small caches, and a router that knows their reports."""

    def __init__(self, replicas: int, config: SimulatedConfig = SMALL) -> None:
        self.engines = {f"r{number}": SimulatedEngine(config) for number in range(replicas)}
        self.ends = Ends()
        self.fleet = Fleet(
            model="m", revision="", block_size=32, rng=random.Random(0), observer=self.ends
        )
        generates = {id_: engine.generate for id_, engine in self.engines.items()}
        self.wired = Wired(generates, {"unstarted": self._unstarted})
        self.dispatcher = dispatcher_of(self.wired, self.fleet)
        self.questions = Counter[str]()  # request -> how often its replica was asked for it
        self.is_first_silent = False  # whether the replica that is asked first never answers

    async def _unstarted(self, packed: bytes, rank: int) -> bytes:
        ids = decode_ids(packed)
        self.questions.update(ids)
        if self.is_first_silent and ids[0] == next(iter(self.questions)):
            await asyncio.Event().wait()
        return encode_ids([id_ for e in self.engines.values() for id_ in await e.unstarted(ids)])

    @asynccontextmanager
    async def serving(self) -> AsyncIterator["Cluster"]:
        async with self.wired, asyncio.TaskGroup() as tasks:
            running = [
                tasks.create_task(self.dispatcher.unstarted.run()),
                tasks.create_task(self._report()),
            ]
            yield self
            for task in running:
                task.cancel()
        for engine in self.engines.values():
            await engine.close()

    async def _report(self) -> None:
        while True:
            self.fleet.update(
                ReplicaRecord(id_, "1", 0, engine.facts, engine.load())
                for id_, engine in self.engines.items()
            )
            await asyncio.sleep(0.01)

    async def start(self, tokens: int, number: int = 0, max_wait_s: float = 60.0) -> Generation:
        urgency = Urgency(max_wait_s=max_wait_s)
        context = RequestContext(time.monotonic(), urgency=urgency)
        call = completion(max_tokens=tokens)
        return await self.dispatcher.generate(PROMPT + number, call, context)

    def waiting(self, replica_id: str) -> int:
        return self.engines[replica_id].load().waiting


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvroute.router.connections.unstarted.CHECK_INTERVAL_S", 0.01)


async def read(generation: Generation) -> list[Chunk]:
    chunks = []
    while chunk := await generation.next():
        chunks.append(chunk)
    return chunks


async def test_a_request_that_no_engine_starts_goes_to_a_replica_that_can_start_it() -> None:
    async with Cluster(2).serving() as cluster:
        cluster.wired.drop("r1")
        await until(lambda: cluster.wired.links.connected() == ["r0"])
        async with aclosing(held(cluster)) as holding:
            await anext(holding)
            asked = asyncio.create_task(cluster.start(4, number=1))
            await until(lambda: cluster.waiting("r0") == 1)
            cluster.wired.list("r1")
            generation = await asked
            assert generation.replica_id == "r1"
            assert sum(len(chunk.token_ids) for chunk in await read(generation)) == 4
            await until(lambda: cluster.waiting("r0") == 0)
    assert cluster.ends.attempts[:2] == [("r0", "moved"), ("r1", "ok")]


async def test_a_request_that_no_engine_starts_within_its_limit_is_refused() -> None:
    async with Cluster(1).serving() as cluster, aclosing(held(cluster)) as holding:
        first = await anext(holding)
        with pytest.raises(ApiError, match="until a replica starts it") as refused:
            await cluster.start(4, number=1, max_wait_s=0.1)
        assert (refused.value.status, refused.value.code) == (429, "wait_too_long")
        assert "retry-after" in refused.value.headers
        assert cluster.ends.refusals == ["deadline"]
        await until(lambda: cluster.waiting("r0") == 0)
        assert first._current.attempt.outcome is None  # what has begun is never taken back


async def test_requests_that_wait_for_the_same_replica_move_one_by_one() -> None:
    async with Cluster(2).serving() as cluster:
        cluster.wired.drop("r1")
        await until(lambda: cluster.wired.links.connected() == ["r0"])
        async with aclosing(held(cluster)) as holding:
            await anext(holding)
            asked = [asyncio.create_task(cluster.start(150, number=n)) for n in (1, 2, 3)]
            await until(lambda: cluster.waiting("r0") == 3)
            cluster.wired.list("r1")
            done, _ = await asyncio.wait(asked, return_when=asyncio.FIRST_COMPLETED)
            moved = [task.result().replica_id for task in done]
            # The next one would need the blocks that the first one holds.
            assert moved[0] == "r1"
            for task in asked:
                generation = await task
                generation.close()


async def test_a_request_that_its_engine_computes_is_left_there() -> None:
    """However long that takes: its wait limit is over, and another replica is idle."""
    config = replace(SMALL, prefill_tokens_per_s=40)  # so it is not over before the questions
    async with Cluster(2, config).serving() as cluster:
        asked = asyncio.create_task(cluster.start(2, max_wait_s=0.1))
        await until(lambda: cluster.questions.total() > 5)
        generation = await asked
        await read(generation)
        assert cluster.ends.attempts == [(generation.replica_id, "ok")]


async def test_a_replica_that_does_not_answer_delays_the_requests_of_no_other() -> None:
    config = replace(SMALL, prefill_tokens_per_s=40)
    async with Cluster(2, config).serving() as cluster:
        cluster.is_first_silent = True
        asked = [asyncio.create_task(cluster.start(2, n, max_wait_s=0.1)) for n in (0, 1)]
        await until(lambda: len(cluster.questions) == 2 and max(cluster.questions.values()) > 5)
        assert cluster.questions[next(iter(cluster.questions))] == 1
        for task in asked:
            await read(await task)


async def test_a_request_is_started_when_the_engine_has_started_one_of_its_choices() -> None:
    engine, chunks = SimulatedEngine(SMALL), list[Chunk]()
    call = completion(max_tokens=150, n=2, temperature=1.0)
    request = GenerateRequest("first", PROMPT, call=call)
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(engine.generate(request, chunks.append))
        await until(lambda: engine.load().waiting == 1)  # the cache has no space for both
        assert await engine.unstarted(["first"]) == []
        running.cancel()
    await engine.close()


async def test_a_call_to_a_replica_that_hangs_has_no_answer() -> None:
    async with Cluster(1).serving() as cluster:
        cluster.is_first_silent = True
        call = cluster.wired.links.call("r0", "unstarted", encode_ids(["1"]), within_s=60.0)
        asking = asyncio.create_task(call)
        await until(lambda: bool(cluster.questions))
        cluster.wired.links.lose("r0", HungError("replica r0 does not answer"))
        with pytest.raises(UnansweredError, match="does not answer"):
            await asking


def test_placement_expects_a_wait_where_answers_hold_the_cache_or_no_prompt_starts() -> None:
    """The router knows the lengths of prompts, and the engine reports what answers hold."""
    fleet = Fleet(model="m", revision="", block_size=32, rng=random.Random(0))
    facts, now_s = SimulatedEngine(SMALL).facts, 100.0
    loads = {
        "free": Load(running=1, used_blocks=2),
        "full": Load(running=1, used_blocks=7),
        "stalled": Load(running=1, waiting=1, used_blocks=2),
    }
    fleet.update(ReplicaRecord(id_, "1", 0, facts, load) for id_, load in loads.items())
    fleet.loads.scale.record_answer(10.0)
    for id_ in loads:
        answering = fleet.sent(fleet.place(PROMPT[:40], [id_], 0.0), id_, f"{id_} 1", 0.0)
        answering.first_token(1.0)
    fleet.sent(fleet.place(PROMPT[:40], ["stalled"], 1.0), "stalled", "stalled 2", 1.0)
    placement = fleet.place(PROMPT, [*loads], now_s)
    waits_s = {candidate.replica_id: candidate.memory_s for candidate in placement.ranking}
    assert waits_s["free"] == 0.0
    assert 0.0 < waits_s["full"] < 10.0
    assert waits_s["stalled"] > 90.0  # at least as long as the prompt that waits there
    assert [candidate.replica_id for candidate in placement.ranking] == ["free", "full", "stalled"]


async def held(cluster: Cluster) -> AsyncGenerator[Generation, None]:
    """Hold the whole cache of r0 by an answer, which is read as it comes."""
    generation = await cluster.start(150)
    reading = asyncio.create_task(read(generation))
    await until(lambda: cluster.engines["r0"].load().used_blocks >= 5)
    try:
        yield generation
    finally:
        reading.cancel()
        await asyncio.wait([reading])
        generation.close()
