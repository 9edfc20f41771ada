"""One replica and one router around a real Redis, in this process, without Ray."""

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import numpy as np

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.records import Description, EngineFacts, TierFacts
from kvroute.contract.unreadable import Unreadable
from kvroute.features.audit.audit_report import ReplicaAudit
from kvroute.features.audit.replica_audits import RankAudits
from kvroute.features.audit.router_audits import RouterAudits
from kvroute.replica.block_table import BlockTable
from kvroute.replica.publisher import Publisher
from kvroute.replica.sim_engine.config import SimulatedConfig
from kvroute.replica.sim_engine.simulated import SimulatedEngine
from kvroute.router.index.feed import Feed
from kvroute.router.placement.fleet import Fleet
from kvroute.router.serving.assembly import Parts
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.wire.structs import decode_begin
from tests.support.records import FACTS, LOAD

MODEL = "m"
CONFIG = SimulatedConfig(
    model=MODEL,
    block_size=4,
    capacity_blocks=100,
    prefill_tokens_per_s=0,
    decode_step_s=0,
    decode_per_seq_s=0,
)


class Side:
    """An engine with a publisher, and a router's mirror of its blocks, all running as tasks."""

    def __init__(
        self,
        url: str,
        *,
        facts: EngineFacts = FACTS,
        revision: str = "",
        host: TierFacts | None = None,
    ) -> None:
        self.redis = connect(url)
        self.index = Index(self.redis, MODEL)
        self.engine = SimulatedEngine(replace(CONFIG, revision=revision, host=host))
        self.table = BlockTable(self.engine.group_entries)
        self.publisher = Publisher(
            self.index,
            self.table,
            replica_id="a",
            description=Description(facts),
            load=lambda: LOAD,
            lease_s=60,
        )
        self.fleet = Fleet(model=MODEL, revision="", block_size=4, rng=random.Random(0))
        feed = Feed(self.index, self.fleet)
        self.audits = RankAudits(self.publisher, self.engine, self.index)
        self.router = RouterAudits()
        self.router.attach(
            cast(
                "Parts",
                SimpleNamespace(
                    index=self.index,
                    feed=feed,
                    fleet=self.fleet,
                    links=self,
                    unreadable=Unreadable(),
                    settings=SimpleNamespace(block_size=4),
                ),
            )
        )
        self.publishing = asyncio.create_task(self.publisher.run())
        self.hearing = asyncio.create_task(self.publisher.receive_events(self.engine))
        self.feeding = asyncio.create_task(feed.run())

    def able(self) -> list[str]:
        return ["a"]

    async def call(self, rank_id: str, method: str, body: bytes, *, within_s: float) -> bytes:
        """Answer the router, in place of a connection to the replica."""
        if method == "audit":
            return msgspec.json.encode(await self.ask())
        _, request = decode_begin(body)
        await self.generate(request)
        return b""

    async def ask(self) -> ReplicaAudit:
        return await self.audits.run()

    async def generate(self, request: GenerateRequest) -> None:
        await self.engine.generate(request, lambda _: None)

    async def work(self, requests: int) -> None:
        """Run requests with random ones of 20 prompts, one after the other."""
        for seed in np.random.default_rng(0).integers(0, 20, requests):
            prompt = np.arange(40, dtype=np.uint32) + 100 * int(seed)
            await self.generate(GenerateRequest("r", prompt, max_tokens=20))

    async def audited(self) -> dict[str, Any]:
        (report,) = await self.router.run()
        return report

    async def drift(self) -> dict[str, int]:
        return dict((await self.audited())["drift"])

    async def close(self) -> None:
        tasks = (self.publishing, self.hearing, self.feeding)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await self.engine.close()
        await self.redis.aclose()
