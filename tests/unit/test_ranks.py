"""A router sees each data parallel rank as a replica of its own, behind one connection."""

import asyncio
import random
import time
from collections.abc import Mapping

import msgspec
import numpy as np
import pytest

from kvroute.contract.generation import Chunk, Emit, EngineDeadError, Generate, GenerateRequest
from kvroute.contract.ranks import rank_ids, replica_of, replicas_of, split
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.router.connections.liveness import SUSPECT_CHECKS, Liveness
from kvroute.router.dispatch.dispatcher import TRIES
from kvroute.router.placement.attempts import RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.wire.address import Address, address_in
from tests.support.answers import completion
from tests.support.records import record
from tests.support.wired import FakeLinks, Wired, dispatcher_of

PROMPT = np.arange(100, dtype=np.uint32)


class Engines:
    """Both ranks of each replica; those of `dead` die of every request."""

    def __init__(self, *dead: str) -> None:
        self.asked: list[tuple[str, int]] = []  # replica, rank
        self._dead = dead

    def generates(self, *replica_ids: str) -> dict[str, Generate]:
        return {id_: self._of(id_) for id_ in replica_ids}

    def _of(self, replica_id: str) -> Generate:
        async def generate(request: GenerateRequest, emit: Emit) -> None:
            self.asked.append((replica_id, request.rank))
            if replica_id in self._dead:
                raise EngineDeadError("as planned")
            emit(Chunk((1,), 0, is_last=True))

        return generate


async def told(body: bytes, rank: int) -> bytes:
    return body + str(rank).encode()


def fleet_of(*rank_ids: str, running: tuple[str, ...] = ()) -> Fleet:
    fleet = Fleet(
        model="m", revision="", block_size=4, rng=random.Random(0), running=lambda: running
    )
    fleet.update([record(id_) for id_ in rank_ids])
    return fleet


async def ask(wired: Wired, fleet: Fleet) -> str:
    """Which rank has answered."""
    dispatcher = dispatcher_of(wired, fleet)
    context = RequestContext(time.monotonic())
    generation = await dispatcher.generate(PROMPT, completion(max_tokens=1), context)
    while await generation.next():
        pass
    return generation._current.replica_id


def test_the_only_rank_has_the_replicas_own_id() -> None:
    assert rank_ids("abc", 1) == ("abc",)
    assert split("abc") == ("abc", 0)


def test_a_rank_can_be_found_by_its_id() -> None:
    ids = rank_ids("abc", 12)
    assert len(set(ids)) == 12
    assert [split(id_) for id_ in ids] == [("abc", rank) for rank in range(12)]
    assert replicas_of((*ids, "b", "c.3")) == {"abc", "b", "c"}


def test_the_address_of_an_older_replica_means_one_rank() -> None:
    new = Address("h", 1, b"s", ranks=2)
    assert address_in(new.as_stats()) == new
    old = {key: value for key, value in msgspec.to_builtins(new).items() if key != "ranks"}
    assert msgspec.convert(old, Address).ranks == 1


async def test_requests_and_calls_reach_the_rank_that_they_name() -> None:
    engines = Engines()
    async with Wired(engines.generates("a", "b"), {"told": told}, ranks=2) as wired:
        assert wired.links.connected() == ["a.0", "a.1", "b.0", "b.1"]
        for id_ in ("b.1", "a.0"):
            stream = wired.links.open(id_, GenerateRequest("r", PROMPT), max_waiting=100)
            while await stream.next():
                pass
            assert await wired.links.call(id_, "told", b"?", within_s=5) == f"?{id_[-1]}".encode()
    assert engines.asked == [("b", 1), ("a", 0)]


async def test_ranks_of_a_lost_connection_are_still_known_but_get_no_requests() -> None:
    async with Wired(Engines().generates("a", "b"), ranks=2) as wired:
        wired.links.lose("a", ConnectionError())
        assert wired.links.connected() == ["b.0", "b.1"]
        assert wired.links.running() == ["a.0", "a.1", "b.0", "b.1"]
        with pytest.raises(UnansweredError):
            await wired.links.call("a.1", "told", b"", within_s=5)


def test_a_replica_that_has_not_reported_counts_as_one_rank() -> None:
    assert Links(lambda: Wired({"a": Engines().generates("a")["a"]})).running() == ["a"]


async def test_without_records_requests_are_spread_over_the_ranks() -> None:
    engines = Engines()
    fleet = fleet_of()
    async with Wired(engines.generates("a"), ranks=3) as wired:
        for _ in range(30):
            await ask(wired, fleet)
    assert set(engines.asked) == {("a", 0), ("a", 1), ("a", 2)}


async def test_a_dead_engine_ends_all_ranks_of_its_replica() -> None:
    engines = Engines("a")
    fleet = fleet_of("a.0", "a.1", "b.0", "b.1", running=("a", "b"))
    async with Wired(engines.generates("a", "b"), ranks=2) as wired:
        answered = {replica_of(await ask(wired, fleet)) for _ in range(10)}
    assert answered == {"b"}
    assert 0 < sum(replica_id == "a" for replica_id, _ in engines.asked) <= 10


async def test_a_full_replica_is_tried_once_whatever_its_number_of_ranks() -> None:
    engines = Engines()
    async with Wired(engines.generates("a", "b"), ranks=TRIES) as wired:
        wired.servers["a"].stop()
        fleet = fleet_of(*rank_ids("a", TRIES), *rank_ids("b", TRIES), running=("a", "b"))
        answered = {replica_of(await ask(wired, fleet)) for _ in range(5)}
        refusals = wired.servers["a"].refusals
    assert answered == {"b"}
    assert 1 <= refusals <= 5


class Silent:
    """The replicas that Serve runs: one that hangs."""

    def ids(self) -> list[str]:
        return ["a"]

    async def probe(self, _: str) -> None:
        await asyncio.Event().wait()


BOTH = ("a.0", "a.1")


@pytest.mark.parametrize(
    ("leased", "reported", "pending_calls", "is_trusted"),
    [
        (BOTH, BOTH, 0, True),
        (("a.0",), BOTH, 0, False),
        ((), BOTH, 0, False),
        (BOTH, (), 0, True),  # according to their records, before a router is connected
        ((), (), 0, False),
        (BOTH, BOTH, 1, False),  # an answer about an image, for example
    ],
)
async def test_a_replica_is_idle_when_all_of_its_ranks_are_and_it_owes_no_answer(
    leased: tuple[str, ...], reported: tuple[str, ...], pending_calls: int, is_trusted: bool
) -> None:
    links = FakeLinks(lambda: ["a.0", "a.1"])
    links.by_replica = {"a": reported}
    links.questions = pending_calls
    replicas: Mapping[str, object] | object = Silent()
    liveness = Liveness(lambda: replicas, links, fleet_of(*leased), hang_timeout_s=5)  # type: ignore[arg-type, return-value]
    tasks = asyncio.TaskGroup()
    async with tasks:
        for _ in range(SUSPECT_CHECKS):
            liveness.check(tasks)
        assert liveness.trusted() == (["a.0", "a.1"] if is_trusted else [])
        for task in tasks._tasks:
            task.cancel()


def test_a_rank_of_a_replica_of_this_model_belongs_to_the_fleet() -> None:
    fleet = fleet_of("a.0", "a.1", "other.0", running=("a",))
    assert [record.id for record in fleet.replicas.own_records] == ["a.0", "a.1"]
    fleet.update([record("a.0")], unreadable={"a.1": "why", "other.1": "why"})
    assert set(fleet.replicas.degraded) == {"a.1"}
