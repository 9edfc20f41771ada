"""Routers that know of each other's requests, through a Redis or without one."""

import asyncio
import contextlib
import math
import random
from collections.abc import AsyncIterator, Callable, Iterable

import numpy as np

from kvroute.contract.generation import TokenIds
from kvroute.contract.records import ReplicaRecord
from kvroute.features.placing_feature import PlacingFeature, PlacingFeatures
from kvroute.router.connections.peers import PeerPublisher, PeerSubscriber
from kvroute.router.placement.attempts import Attempt
from kvroute.router.placement.fleet import Fleet
from kvroute.store.connection import connect
from kvroute.store.index import Index
from tests.support.records import FACTS, LOAD
from tests.support.waiting import until

REPLICAS = ["a", "b"]


class Router:
    """A fleet with its two ends to the others."""

    def __init__(self, origin: str = "", features: Iterable[PlacingFeature] = ()) -> None:
        placing = PlacingFeatures(features)
        self.now_s = 100.0
        self.blamed: list[bytes] = []
        self.peer_publisher = PeerPublisher(origin=origin, features=placing)
        self.fleet = Fleet(
            model="m",
            revision="",
            block_size=4,
            rng=random.Random(0),
            observer=self.peer_publisher,
            features=placing,
        )
        self.fleet.update([ReplicaRecord(name, "1", 0, FACTS, LOAD) for name in REPLICAS])
        for name in REPLICAS:
            self.fleet.mirror.join(name)
        self.listener = PeerSubscriber(
            self.fleet,
            own=self.peer_publisher.router,
            origin=origin,
            blamed=self.blamed.append,
            clock=lambda: self.now_s,
        )

    def send(self, token_ids: TokenIds, request_id: str = "r") -> Attempt:
        placement = self.fleet.place(token_ids, REPLICAS, self.now_s)
        replica_id = placement.ranking[0].replica_id
        return self.fleet.sent(placement, replica_id, request_id, self.now_s)

    def backlogs_s(self) -> dict[str, float]:
        placement = self.fleet.place(prompt(1), REPLICAS, self.now_s)
        return {c.replica_id: c.backlog_s for c in placement.ranking}

    def hears(self, others: int) -> Callable[[], bool]:
        return lambda: len(self.listener._last_message_s) == others

    def expects_when_told(self, token_ids: TokenIds) -> set[str]:
        """Return what it expects once the index has told what ended requests have computed."""
        self.fleet.mirror.forget_computed(math.inf)
        return self.expects(token_ids)

    def expects(self, token_ids: TokenIds) -> set[str]:
        return set(self.fleet.mirror.hits(self.fleet.caches.chain(token_ids)))


def prompt(seed: int, tokens: int = 400) -> TokenIds:
    return np.random.default_rng(seed).integers(0, 1000, tokens).astype(np.uint32)


@contextlib.asynccontextmanager
async def connected(url: str, *routers: Router) -> AsyncIterator[None]:
    client = connect(url)
    index = Index(client, "m")
    tasks = [
        asyncio.create_task(run)
        for router in routers
        for run in (
            router.peer_publisher.run(index, router.listener),
            router.listener.run(index),
        )
    ]
    for router in routers:
        await until(router.hears(len(routers) - 1))
    yield
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await client.aclose()
