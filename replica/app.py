"""One engine behind Ray Serve: it generates, and keeps the index right about what it holds."""

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import psutil
import ray
from ray import serve

from replica.backlog import Backlog, occupancy
from replica.draining import draining
from replica.engines import start_engine
from replica.events import BlockTable
from replica.exposition import Exposition
from replica.identity import identify
from replica.kvindex.index import Index, connect
from replica.kvindex.prefixes import Prefixes
from replica.logs import log_to_serve
from replica.metrics import ReplicaMetrics
from replica.model import resolve
from replica.protocol import AuditRequest, Chunk, EngineDeadError, GenerateRequest, ReplicaAudit
from replica.publisher import Publisher
from replica.settings import ReplicaSettings
from replica.tracing import start_tracing
from replica.warmer import Warmer

log = logging.getLogger("kvroute.replica")

CHECK_S = 0.5  # between looks at the engine
AUDIT_S = 10.0  # the longest an audit may take; it waits for the engine's step and for Redis


@serve.deployment
class Replica:
    """The deployment; everything but Ray Serve's hooks is in the engine and the publisher."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = ReplicaSettings.model_validate(settings)
        self.id = serve.get_replica_context().replica_id.unique_id
        log_to_serve(self._settings.served_model_name)
        self._tracing = start_tracing("kvroute-replica", self.id)
        self._engine = await start_engine(self._settings)
        engine, traces = self._engine, self._tracing
        self._generate = traces.traced(engine.generate) if traces else engine.generate
        log.info("reuse_cache: %s", self._settings.prefix_caching)
        self._redis = connect(self._settings.redis_url)
        self._index = Index(self._redis, self._settings.served_model_name)
        self._metrics = ReplicaMetrics()
        self._backlog = Backlog(self._engine.facts.prefill_tokens_per_s)
        self._exposition = await self._expose() if self._settings.metrics else None
        self._publisher = self._make_publisher()
        self._warmer = self._make_warmer()
        self._metrics.watch(self._engine, self._publisher)
        self._tasks = [
            asyncio.create_task(self._keep_index(), name="index"),
            asyncio.create_task(
                self._publisher.hear(self._engine, self._metrics.happened), name="events"
            ),
            asyncio.create_task(self._die_with_engine(), name="die-with-engine"),
        ]
        await self._warmer.start(self._settings.declared)
        self._tasks.append(asyncio.create_task(self._warmer.run(), name="warmer"))

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks as the engine makes them; a caller that goes away aborts the request."""
        is_first = True
        new_tokens = len(request.token_ids) - request.expected_tokens
        self._backlog.arrived(request.request_id, new_tokens, time.monotonic())
        try:
            async with contextlib.aclosing(self._generate(request)) as chunks:
                async for chunk in chunks:
                    if is_first:
                        self._begun(request)
                    self._metrics.heard(request, chunk, is_first=is_first)
                    is_first = False
                    yield chunk
        finally:
            self._backlog.gone(request.request_id, time.monotonic())

    async def canary(self, request: GenerateRequest) -> None:
        """The engine has answered it. Nobody asked for it, so no metric counts it."""
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            async for _ in chunks:
                pass

    def _begun(self, request: GenerateRequest) -> None:
        """It has its first token."""
        self._backlog.first_token(request.request_id, time.monotonic())
        if request.lora:
            self._publisher.renew_soon()  # its adapter may have been loaded for it

    async def audit(self, request: AuditRequest) -> ReplicaAudit:
        """What the engine has cached, beside what it said before and what the index has of it.
        TimeoutError where the engine, or Redis, does not answer."""
        async with asyncio.timeout(AUDIT_S):
            return await self._publisher.audit(self._engine)

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """What router/autoscaling.py decides by; Serve asks when the fleet finds its own size."""
        engine, load, now_s = self._engine, self._engine.load(), time.monotonic()
        pinned_blocks = sum(engine.pins.values())  # every replica's: they go with none
        return {
            "wait_s": self._backlog.wait_s(now_s),
            "service_s": self._backlog.service_s(),
            "occupancy": occupancy(
                busy_share=self._backlog.busy_share(now_s),
                running=load.running,
                most_running=engine.facts.max_num_seqs,
                used_blocks=load.used_blocks - pinned_blocks,
                blocks=engine.facts.capacity_blocks - pinned_blocks,
            ),
        }

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises."""
        await self._engine.check()
        for task in self._tasks:
            if task.done():
                task.result()  # an index that is no longer fed goes wrong for good

    async def __del__(self) -> None:
        """Serve's shutdown hook, when what ran is finished or was given up."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._publisher.leave()
        if self._exposition:
            await asyncio.to_thread(self._exposition.close)
        await self._redis.aclose()
        await self._engine.close()
        if self._tracing:
            await asyncio.to_thread(self._tracing.close)

    async def _expose(self) -> Exposition:
        return await asyncio.to_thread(Exposition, ray.util.get_node_ip_address())

    def _make_publisher(self) -> Publisher:
        settings = self._settings
        facts = self._engine.facts
        identity = dataclasses.asdict(
            identify(
                resolve(settings.model),
                revision=settings.revision,
                block_size=facts.block_size,
                adapters=settings.adapters,
            )
        )
        table = BlockTable(
            model=settings.served_model_name,
            revision=settings.revision,
            block_size=facts.block_size,
        )
        return Publisher(
            self._index,
            table,
            replica_id=self.id,
            facts=dataclasses.asdict(facts) | identity | self._whereabouts(),
            load=lambda: self._load(),
            pins=lambda: self._warmer.kept(),
            lease_s=settings.lease_s,
        )

    def _make_warmer(self) -> Warmer:
        return Warmer(
            self._engine,
            Prefixes(self._redis, self._settings.served_model_name),
            self._index,
            replica_id=self.id,
            tell=self._publisher.renew_soon,
        )

    def _whereabouts(self) -> dict[str, Any]:
        return {
            "model": self._settings.served_model_name,
            "node": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "metrics": self._exposition and self._exposition.address,
        }

    def _load(self) -> Mapping[str, Any]:
        return dataclasses.asdict(self._engine.load())

    async def _keep_index(self) -> None:
        """The replica is in the index until it drains: what it then finishes ends with it."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publisher.run(), name="publisher")
            await draining()
            publishing.cancel()
        await self._publisher.leave()

    async def _die_with_engine(self) -> None:
        """Whoever waits for an answer learns at once that none will come, and Serve starts another
        replica: failing health checks would take it many seconds."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self._engine.check()
            except EngineDeadError as error:
                log.error("the replica ends with its engine: %s", error)
                _kill_children()  # a stopped one would stay
                os._exit(1)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
