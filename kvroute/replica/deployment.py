"""A replica runs one engine behind Ray Serve and keeps the index up to date."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncGenerator
from typing import Any

import psutil
import ray
from ray import serve

from kvroute.contract.audit_report import encode_audit
from kvroute.contract.generation import (
    NO_TOKENS,
    Chunk,
    EngineDeadError,
    GenerateRequest,
    client_id,
)
from kvroute.contract.http_call import call_in, encode_part, encode_rendered, joined_parts
from kvroute.contract.identity import identify
from kvroute.contract.records import Description, Whereabouts
from kvroute.process.builtin_model import resolve
from kvroute.process.draining import draining
from kvroute.process.exposition import Exposition
from kvroute.process.logs import log_to_serve
from kvroute.process.tracing import start_tracing
from kvroute.replica.backlog import Backlog, occupancy
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.engines import start_engine
from kvroute.replica.publisher import Publisher
from kvroute.replica.warmer import Warmer
from kvroute.settings.replica import ReplicaSettings
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.store.prefixes import Prefixes
from kvroute.wire.address import Address
from kvroute.wire.server import HOST, Server
from kvroute.wire.structs import request_in

log = logging.getLogger("kvroute.replica")

CHECK_INTERVAL_S = 0.5  # between checks of the engine
AUDIT_S = 10.0  # the timeout of an audit; it waits for the engine's step and for Redis
MOST_REQUESTS = 1024  # running and waiting here before further ones are refused


@serve.deployment
class Replica:
    """The Serve deployment: hooks for Serve around the engine, the publisher and the warmer."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = ReplicaSettings.model_validate(settings)
        self.id = serve.get_replica_context().replica_id.unique_id
        log_to_serve(self._settings.served_model_name)
        self._tracing = start_tracing("kvroute-replica", self.id)
        self._engine = await start_engine(self._settings)
        engine, traces = self._engine, self._tracing
        self._run = traces.traced(engine.generate) if traces else engine.generate
        log.info("reuse_cache: %s", self._settings.prefix_caching)
        self._redis = connect(self._settings.redis_url)
        self._index = Index(
            self._redis, self._settings.served_model_name, cluster=self._settings.cluster
        )
        self._metrics = ReplicaMetrics()
        self._backlog = Backlog(self._engine.facts.prefill_tokens_per_s)
        self._exposition = await self._expose() if self._settings.metrics else None
        self._publisher = self._make_publisher()
        self._warmer = self._make_warmer()
        self._metrics.export(self._engine, self._publisher)
        self._tasks = [
            asyncio.create_task(self._keep_index(), name="index"),
            asyncio.create_task(
                self._publisher.receive_events(self._engine, self._metrics.happened), name="events"
            ),
            asyncio.create_task(self._die_with_engine(), name="die-with-engine"),
        ]
        await self._warmer.start(self._settings.declared)
        self._tasks.append(asyncio.create_task(self._warmer.run(), name="warmer"))
        methods = {
            "audit": self._audit,
            "canary": self._canary,
            "render": self._render,
            "http": self._http,
        }
        self._server = Server(self._generate, methods, most=MOST_REQUESTS)
        self._refusals = 0  # at the last report
        self._host = os.environ.get(HOST) or ray.util.get_node_ip_address()
        await self._server.start(self._host, self._settings.ports)

    async def record_routing_stats(self) -> dict[str, Any]:
        """Routers ask for it, through Serve's process: where their connections go."""
        return Address(self._host, self._server.port, self._server.secret).as_stats()

    async def _generate(self, request: GenerateRequest) -> AsyncGenerator[Chunk, None]:
        """The engine's chunks; closing the generator aborts the request."""
        is_first, tokens, began_s = True, 0, time.monotonic()
        new_tokens = len(request.token_ids) - request.expected_tokens
        self._backlog.arrived(request.request_id, new_tokens, began_s)
        try:
            async with contextlib.aclosing(self._run(request)) as chunks:
                async for chunk in chunks:
                    if chunk.token_ids:
                        if is_first:
                            self._begun(request)
                        self._metrics.received(request, chunk, is_first=is_first)
                        is_first = False
                    tokens += len(chunk.token_ids)
                    yield chunk
        finally:
            now_s = time.monotonic()
            self._backlog.gone(request.request_id, now_s)
            log.info(
                *("generated %d tokens in %.1f ms", tokens, 1e3 * (now_s - began_s)),
                extra={"request_id": client_id(request.request_id)},
            )

    async def _canary(self, begin: bytes) -> bytes:
        """Runs the request without counting it in metrics: no client sent it."""
        request = request_in(begin)
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            async for _ in chunks:
                pass
        return b""

    async def _render(self, call: bytes) -> bytes:
        """The prompt of an HTTP request, which the router cannot render itself."""
        return encode_rendered(await self._engine.render(call_in(call)))

    async def _http(self, call: bytes) -> bytes:
        """The whole response to an HTTP request for which the engine does not generate."""
        http = call_in(call)
        request = GenerateRequest(f"{http.request_id}-0", NO_TOKENS, http.namespace, call=http)
        async with contextlib.aclosing(self._engine.generate(request)) as chunks:
            return encode_part(joined_parts([chunk.http async for chunk in chunks if chunk.http]))

    def _begun(self, request: GenerateRequest) -> None:
        """The request has its first token."""
        self._backlog.first_token(request.request_id, time.monotonic())
        if request.lora:
            self._publisher.renew_soon()  # the list of loaded adapters may have changed

    async def _audit(self, _: bytes) -> bytes:
        """Compares the engine's blocks with the replica's table and with the index: an encoded
        ReplicaAudit. Raises TimeoutError when the engine or Redis does not respond."""
        async with asyncio.timeout(AUDIT_S):
            return encode_audit(await self._publisher.audit(self._engine))

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """The input of kvroute/autoscaling.py; Serve reads it when autoscaling is on."""
        engine, load, now_s = self._engine, self._engine.load(), time.monotonic()
        refused, self._refusals = self._server.refusals - self._refusals, self._server.refusals
        pinned_blocks = sum(engine.pins.values())  # ignored: every replica needs its own
        return {
            "wait_s": self._backlog.wait_s(now_s),
            "service_s": self._backlog.service_s(),
            "refusing": float(refused > 0),
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
                task.result()  # without this task the index would stay wrong

    async def __del__(self) -> None:
        """Serve's shutdown hook; it waits until all requests have finished, or Serve kills it."""
        self._server.stop()
        await self._server.idle()
        await self._server.close()
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
        identity = identify(
            resolve(settings.model),
            revision=settings.revision,
            block_size=facts.block_size,
            adapters=settings.adapters,
        )
        return Publisher(
            self._index,
            BlockTable(self._engine.members),
            replica_id=self.id,
            description=Description(
                facts, identity, self._whereabouts(), settings.served_model_name
            ),
            load=lambda: self._engine.load(),
            pins=lambda: self._warmer.kept(),
            lease_s=settings.lease_s,
        )

    def _make_warmer(self) -> Warmer:
        return Warmer(
            self._engine,
            Prefixes(
                self._redis,
                self._settings.served_model_name,
                cluster=self._settings.cluster,
                unreadable=self._index.unreadable,
            ),
            self._index,
            replica_id=self.id,
            on_change=self._publisher.renew_soon,
        )

    def _whereabouts(self) -> Whereabouts:
        metrics = self._exposition.address if self._exposition else None
        return Whereabouts(ray.util.get_node_ip_address(), os.getpid(), metrics)

    async def _keep_index(self) -> None:
        """Keeps the replica in the index until it drains; then it gets no new requests."""
        async with asyncio.TaskGroup() as tasks:
            publishing = tasks.create_task(self._publisher.run(), name="publisher")
            await draining()
            self._server.stop()
            publishing.cancel()
        await self._publisher.leave()

    async def _die_with_engine(self) -> None:
        """Ends this process when the engine dies. Callers get an error at once, and Serve starts a
        new replica at once; failing health checks would take many seconds."""
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._engine.check()
            except EngineDeadError as error:
                log.error("the replica ends with its engine: %s", error)
                _kill_children()  # a stopped (SIGSTOP) one would survive
                os._exit(1)


def _kill_children() -> None:
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
