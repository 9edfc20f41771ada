"""However much has passed through, what stays in memory is what lives."""

import asyncio
import gc
import math
import random
import time
import tracemalloc
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from kvroute.blocks.chain import Scope
from kvroute.contract.generation import TokenIds
from kvroute.replica.block_table import BlockTable
from kvroute.replica.publisher import Publisher
from kvroute.replica.sim_engine.blocks import BlockPool
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.index.feed import Feed
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.mirrors import held_by
from tests.support.records import DESCRIPTION, LOAD
from tests.support.waiting import until

MODEL = "soaked"
BLOCK = 4  # tokens
CAPACITY = 1000  # blocks of one replica
PROMPT = 100  # blocks
LIFE = 200  # prompts, until the replica leaves
GENERATION = 500  # blocks that are remembered when they left: their number differs by so many
WARM_UP, LIVES = 5, 10
GROWTH_BYTES = 250_000  # one fingerprint kept of each block would be 28 times that


class Replica:
    """A cache, and a publisher that tells of it."""

    def __init__(self, index: Index) -> None:
        self.id = uuid.uuid4().hex[:8]
        self.table = BlockTable()
        self._pool = BlockPool(model=MODEL, block_size=BLOCK, capacity_blocks=CAPACITY)
        self._publisher = Publisher(
            index,
            self.table,
            replica_id=self.id,
            description=DESCRIPTION,
            load=lambda: LOAD,
            lease_s=30.0,
        )

    @asynccontextmanager
    async def living(self) -> AsyncIterator[None]:
        publishing = asyncio.create_task(self._publisher.run())
        yield
        publishing.cancel()
        await asyncio.wait([publishing])
        await self._publisher.leave()

    def compute(self, token_ids: TokenIds) -> None:
        table = self._pool.table(token_ids, Scope())
        self._pool.admit(table)
        self._pool.extend(table, len(token_ids))
        self._pool.free(table)
        self._publisher.publish(self._pool.drain())


class Router:
    """All that one knows of the replicas. It hears its own requests as if they were another's."""

    def __init__(self, index: Index) -> None:
        self._peer_publisher = PeerPublisher()
        self.fleet = Fleet(
            model=MODEL,
            revision="",
            block_size=BLOCK,
            rng=random.Random(0),
            observer=self._peer_publisher,
        )
        self.feed = Feed(index, self.fleet)
        self._peer_subscriber = PeerSubscriber(self.fleet, own="")

    def send(self, token_ids: TokenIds, replica_id: str) -> None:
        now_s = time.monotonic()
        placement = self.fleet.place(token_ids, [replica_id], now_s)
        attempt = self.fleet.sent(placement, replica_id, uuid.uuid4().hex, now_s)
        self._peer_subscriber.receive(self._peer_publisher.next_message())
        attempt.first_token(now_s)
        attempt.end()
        self._peer_subscriber.receive(self._peer_publisher.next_message())

    def knows(self, replica: Replica) -> bool:
        return held_by(self.fleet.mirror, replica.id) == set(replica.table.held())


async def live(index: Index, router: Router, rng: np.random.Generator) -> None:
    """One replica comes, takes a whole life's prompts, no two of them alike, and leaves."""
    replica = Replica(index)
    async with replica.living():
        for number in range(LIFE):
            token_ids = rng.integers(0, 2**16, PROMPT * BLOCK).astype(np.uint32)
            router.send(token_ids, replica.id)
            replica.compute(token_ids)
            if number % 10 == 0:
                await asyncio.sleep(0.01)  # to write and to read
        await until(lambda: router.knows(replica))
    await until(lambda: not router.fleet.replicas.records)
    await until(lambda: not len(router.fleet.mirror))  # once it has swept


def traced_bytes(router: Router) -> int:
    """Return the size of all objects, without what the router keeps for INDEX_DELAY_S."""
    router.fleet.mirror.forget_computed(math.inf)
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


@pytest.fixture
async def index(redis_url: str) -> AsyncIterator[Index]:
    async with connect(redis_url) as client:
        await client.flushall()  # other tests' changes would pass through its feed
        yield Index(client, MODEL)


@pytest.fixture
async def router(index: Index, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Router]:
    monkeypatch.setattr("kvroute.router.index.feed.POLL_S", 0.05)
    monkeypatch.setattr("kvroute.router.index.feed.WAIT_MS", 10)
    monkeypatch.setattr("kvroute.router.index.mirror.GENERATION", GENERATION)
    router = Router(index)
    following = asyncio.create_task(router.feed.run())
    yield router
    following.cancel()
    await asyncio.wait([following])


async def test_three_hundred_thousand_blocks_leave_nothing_behind(
    index: Index, router: Router
) -> None:
    rng = np.random.default_rng(0)
    tracemalloc.start()
    try:
        for _ in range(WARM_UP):
            await live(index, router, rng)
        before = traced_bytes(router)
        for _ in range(LIVES):
            await live(index, router, rng)
        assert traced_bytes(router) - before < GROWTH_BYTES
    finally:
        tracemalloc.stop()
    mirror = router.fleet.mirror
    await until(lambda: not len(mirror))  # once it has swept
    assert (len(mirror._expected), router.fleet.loads.by_id()) == (0, {})
    assert 0 < len(mirror._history) <= 2 * GENERATION
