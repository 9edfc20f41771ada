"""What a router shows of its requests and replicas."""

import asyncio
import json
import random
import uuid
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np
import pytest

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.generation import Chunk
from kvroute.contract.records import Load, ReplicaRecord
from kvroute.features.figure import Figure
from kvroute.features.page.decisions import DECISIONS, RECEIPT_REPLICAS, Decisions
from kvroute.features.page.view import View
from kvroute.features.router_feature import RouterFeature
from kvroute.router.connections.deployed import DeployedReplicas
from kvroute.router.connections.liveness import SUSPECT_CHECKS, Liveness
from kvroute.router.connections.peers import PeerSubscriber
from kvroute.router.connections.replica_source import Deployed, NoReplicaError
from kvroute.router.connections.replica_states import StatesReader
from kvroute.router.index.feed import Feed
from kvroute.router.observability.observers import RequestObservers
from kvroute.router.observability.queue_report import RecentWaits
from kvroute.router.observability.recent_requests import RecentTokens
from kvroute.router.placement.attempts import Attempt, RequestContext
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.ledger import CAUSES, Ledger, account
from kvroute.router.placement.waits import NO_WAIT, Wait
from kvroute.router.queueing.queue import Queue, QueuedRequest
from kvroute.router.serving.assembly import Parts
from kvroute.settings.router import RouterSettings
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.records import DESCRIPTION, FACTS, LOAD
from tests.support.wired import FakeLinks


def ledger(tokens: int, delivered: int = 0) -> Ledger:
    return account(tokens, cacheable=tokens, reusable=0, expected=0, delivered=delivered)


def in_serve() -> Deployed:
    return Deployed(3, {"r000": "RUNNING"}, frozenset())


class Watched(RouterFeature):
    """A feature with a figure."""

    async def figures(self) -> Sequence[Figure]:
        return [Figure("Tea", "2 cups", "warm", "What there is.")]


class Serving:
    """What Serve runs, and can do to it, as replicas.Replicas."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.hung: set[str] = set()

    def ids(self) -> list[str]:
        return self.names

    async def probe(self, replica_id: str) -> None:
        if replica_id in self.hung:
            raise NoReplicaError(replica_id)

    async def kill(self, replica_id: str) -> None: ...


class Seen:
    """A fleet of some replicas whose router's page is looked at."""

    def __init__(self, client: Any, replicas: int = 2) -> None:
        self.names = [f"r{number:03}" for number in range(replicas)]
        self.decisions, sums = Decisions(), RecentTokens()
        self.queue = Queue[None](lambda: 1.0)
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=4,
            rng=random.Random(0),
            observer=RequestObservers(self.decisions, sums),
        )
        serving: Any = Serving(self.names)
        links: Any = FakeLinks(serving.ids)
        self.serving, self.links = serving, links
        self.liveness = Liveness(lambda: serving, links, self.fleet, hang_timeout_s=5.0)
        index = Index(client, "seen")
        parts = SimpleNamespace(
            settings=RouterSettings(model="m", served_model_name="m", redis_url="", block_size=4),
            index=index,
            fleet=self.fleet,
            feed=Feed(index, self.fleet),
            states=StatesReader(links, self.liveness, self.fleet, DeployedReplicas(in_serve)),
            queue=self.queue,
            telemetry=SimpleNamespace(recent_tokens=sums, recent_waits=RecentWaits()),
            features=[RouterFeature(), Watched()],
            subscriber=PeerSubscriber(self.fleet, own="me"),
        )
        self.view = View(cast("Parts", parts), self.decisions)
        self.update()

    def update(self, load: Load = LOAD) -> None:
        self.fleet.update([ReplicaRecord(name, "1", 0, FACTS, load) for name in self.names])

    def send(self, *, to: str = "r000", wait: Wait = NO_WAIT, request_id: str = "") -> Attempt:
        """A prompt of 10 tokens."""
        placement = self.fleet.place(np.arange(10, dtype=np.uint32), self.names, 1.0)
        context = RequestContext(1.0 - wait.waited_s, wait=wait)
        return self.fleet.sent(placement, to, request_id or uuid.uuid4().hex, 1.0, context)

    async def snapshot(self, kind: str) -> list[Any]:
        """All things of that kind, in order."""
        state = await self.view.snapshot()
        return [json.loads(value) for key, value in state.items() if key.startswith(kind)]


def answer(attempt: Attempt, cached_tokens: int = 0) -> None:
    attempt.receive(Chunk((1,), cached_tokens, is_last=True), 1.5)
    attempt.end()


@pytest.fixture
async def client(redis_url: str) -> AsyncIterator[Any]:
    async with connect(redis_url) as client:
        yield client


async def test_a_decision_says_where_its_answer_continued_after_its_replica_was_lost(
    client: Any,
) -> None:
    seen = Seen(client)

    async def fate() -> tuple[str, str | None, str | None]:
        first, *_ = await seen.snapshot("decision/")
        return first["outcome"], first["continued_at"], first["continued_outcome"]

    lost = seen.send(request_id="a")
    seen.send(request_id="another")
    lost.receive(Chunk((1,), 0), 1.5)
    lost.end("failed")
    assert await fate() == ("failed", None, None)
    again = seen.send(to="r001", request_id="a")
    assert await fate() == ("failed", "r001", None)
    answer(again)
    assert await fate() == ("failed", "r001", "ok")
    (told,) = await seen.snapshot("ledger")
    assert told["requests"] == 1


async def test_a_decision_tells_of_its_request_until_it_is_over(client: Any) -> None:
    seen = Seen(client)
    attempt = seen.send()
    (told,) = await seen.snapshot("decision/")
    assert (told["replica"], told["outcome"], told["ttft_s"]) == ("r000", None, None)
    answer(attempt, cached_tokens=4)
    (told,) = await seen.snapshot("decision/")
    assert (told["outcome"], told["ttft_s"], told["cached_tokens"]) == ("ok", 0.5, 4)
    assert told["ledger"] == msgspec.structs.asdict(
        ledger_of(hit=0, unexpected_hit=4, new=4, tail=2)
    )
    assert told["evicted_why"] is None
    assert {each["id"] for each in told["receipt"]["replicas"]} == {"r000", "r001"}


def ledger_of(**tokens: int) -> Ledger:
    return Ledger(**(dict.fromkeys(CAUSES, 0) | tokens))


async def test_a_request_that_found_its_replica_full_is_one_decision(client: Any) -> None:
    seen = Seen(client)
    seen.send().end("moved")
    answer(seen.send(to="r001"))
    (told,) = await seen.snapshot("decision/")
    assert told["replica"] == "r001"
    assert seen.decisions.in_flight == 0


async def test_only_the_last_decisions_are_remembered(client: Any) -> None:
    seen = Seen(client)
    for _ in range(DECISIONS + 10):
        answer(seen.send())
    told = await seen.snapshot("decision/")
    assert [each["number"] for each in told] == list(range(11, DECISIONS + 11))
    (sums,) = await seen.snapshot("ledger")
    assert sums["requests"] == DECISIONS + 10
    assert sums["tokens"] == msgspec.structs.asdict(ledger_of(new=8 * 60, tail=2 * 60))


async def test_a_receipt_of_a_large_fleet_has_the_best_of_it(client: Any) -> None:
    seen = Seen(client, replicas=120)
    seen.send()
    (told,) = await seen.snapshot("decision/")
    assert (len(told["receipt"]["replicas"]), told["of_replicas"]) == (RECEIPT_REPLICAS, 120)
    assert len(await seen.snapshot("replica/")) == 120


async def test_a_replica_is_ready_silent_or_elsewhere(client: Any) -> None:
    seen = Seen(client, replicas=3)
    seen.serving.names = ["r000", "r001", "new"]
    seen.serving.hung = {"r001"}
    attempt = seen.send(to="r001")
    async with asyncio.TaskGroup() as tasks:
        for _ in range(SUSPECT_CHECKS):
            seen.liveness.check(tasks)
    attempt.end()
    states = {each["id"]: each["state"] for each in await seen.snapshot("replica/")}
    assert states == {"new": "ready", "r000": "ready", "r001": "silent", "r002": "elsewhere"}
    (router,) = await seen.snapshot("router")
    assert router["wanted"] == 3
    seen.links.away_reasons = {"new": "its server does not answer"}
    assert (await seen.snapshot("replica/new"))[0]["state"] == "away"


async def test_a_decision_tells_how_long_it_was_held_back(client: Any) -> None:
    seen = Seen(client)
    answer(seen.send(wait=Wait("default", "busy", 2.5)))
    (told,) = await seen.snapshot("decision/")
    assert (told["queued_s"], told["ttft_s"]) == (2.5, 0.5)


async def test_what_waits_and_figures_of_features_are_told(client: Any) -> None:
    seen = Seen(client)
    seen.queue.add(QueuedRequest(None, arrived_s=1.0, prefill_s=0.5))
    (told,) = await seen.snapshot("queue")
    assert (told["requests"], told["prefill_s"]) == (1, 0.5)
    assert await seen.snapshot("figures") == [[["Tea", "2 cups", "warm", "What there is.", False]]]


async def test_a_tile_has_what_the_index_knows(client: Any) -> None:
    seen, index = Seen(client), Index(client, "seen")
    standing = await index.register("r000", "1", description=DESCRIPTION, load=LOAD, lease_s=30)
    await index.change(standing, added=[Fingerprint(n) for n in range(7)], lease_s=30)
    seen.update(Load(pinned_blocks=5))
    answer(seen.send(), cached_tokens=4)
    first, second = await seen.snapshot("replica/")
    assert (first["cached_blocks"], first["pinned_blocks"], first["capacity_blocks"]) == (7, 5, 100)
    assert (first["requests"], first["hit_tokens"], first["prompt_tokens"]) == (1, 4, 10)
    assert (second["cached_blocks"], second["requests"]) == (0, 0)
