"""An engine with all its ranks: serves the requests of routers, and publishes its blocks."""

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvroute.contract.adapters import digests
from kvroute.contract.generation import (
    NO_TOKENS,
    Chunk,
    Emit,
    EngineDeadError,
    GenerateRequest,
    decode_ids,
    encode_ids,
)
from kvroute.contract.http_call import decode_call, encode_part, encode_rendered, joined_parts
from kvroute.contract.identity import identify
from kvroute.contract.ranks import rank_ids
from kvroute.contract.records import Description, ProcessLocation
from kvroute.features import FEATURES
from kvroute.features.replica_feature import ReplicaBase, ReplicaFeatures
from kvroute.process.builtin_model import resolve
from kvroute.process.metrics_port import Exposition, expose
from kvroute.process.surroundings import Surroundings
from kvroute.process.tracing import Tracing
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.engines import start_engines
from kvroute.replica.rank import Rank, autoscaling_stats
from kvroute.settings.replica import ReplicaSettings
from kvroute.store.connection import connect
from kvroute.store.index import Index
from kvroute.wire.address import Address
from kvroute.wire.server import Method, Server, new_secret
from kvroute.wire.tls import server_ends

log = logging.getLogger("kvroute.replica")

CHECK_INTERVAL_S = 0.5  # seconds between two checks of the engine
REPORT_INTERVAL_S = 0.25  # seconds between two reports of pending tokens to routers
# Maximum number of running and waiting requests of a rank. Further requests are rejected.
MAX_REQUESTS = 1024


class EngineServer:
    """The ranks of one engine, and the server to which routers connect. Use `start`."""

    def __init__(
        self,
        settings: ReplicaSettings,
        replica_id: str,
        surroundings: Surroundings,
        *,
        host: str,
        metrics: ReplicaMetrics,
        tracing: Tracing | None = None,
        on_death: Callable[[EngineDeadError], object],
        is_shared: bool = False,
    ) -> None:
        """Create the server without an engine.

        Args:
            settings: The replica's settings.
            replica_id: The replica's id.
            surroundings: The place where the replica runs.
            host: The address on which the server listens.
            metrics: The replica's metrics.
            tracing: Records the spans of requests; None: none are recorded.
            on_death: Called once if the engine dies.
            is_shared: Whether other processes with the same replica id may use the same engine. One
                of them at a time publishes its cache.
        """
        self.id = replica_id
        self._settings = settings
        self._surroundings = surroundings
        self._host = host
        self._metrics = metrics
        self._tracing = tracing
        self._on_death = on_death
        self._is_shared = is_shared
        self._features = ReplicaFeatures()

    async def start(self) -> None:
        """Start the engine, register it in the index, and listen."""
        secret = new_secret()
        engines = await start_engines(self._settings, self.id, host=self._host, secret=secret)
        log.info("reuse_cache: %s", self._settings.prefix_caching)
        self._redis = connect(self._settings.redis_url)
        self._exposition = await self._expose() if self._settings.metrics else None
        index = Index(self._redis, self._settings.served_model_name, cluster=self._settings.cluster)
        self._ranks = self._make_ranks(engines, index)
        self._server = Server(
            self._generate,
            self._methods(),
            max_requests=MAX_REQUESTS * len(self._ranks),
            secret=secret,
            tls=await asyncio.to_thread(server_ends, self._settings.tls, secret),
        )
        base = ReplicaBase(self._settings, self._redis, index, self._ranks, self._server.refusal)
        sides = (feature.replica(base) for feature in FEATURES)
        self._features = ReplicaFeatures(side for side in sides if side is not None)
        self._metrics.export(
            engines,
            [rank.publisher for rank in self._ranks],
            [rank.ghosts for rank in self._ranks],
        )
        # Time at which the drain began, on the event loop's clock; before the drain, the start.
        self._drained_s = asyncio.get_running_loop().time()
        self._tasks = [
            asyncio.create_task(self._keep_index(), name="index"),
            *(rank.follow_events() for rank in self._ranks),
            asyncio.create_task(self._watch_engine(), name="watch-engine"),
        ]
        await self._features.start()
        self._tasks += [
            asyncio.create_task(task, name=name) for name, task in self._features.tasks().items()
        ]
        self._server.methods |= self._features.methods()
        self._refusals = 0  # value of the server's counter at the last report for autoscaling
        await self._server.start(self._host, self._settings.ports)
        self._tasks.append(asyncio.create_task(self._report_pending(), name="report-pending"))
        self._tasks.append(asyncio.create_task(self._refuse_while_away(), name="engine-away"))

    def address(self) -> Address:
        """Return the address that routers connect to."""
        server = self._server
        ranks, tls = len(self._ranks), self._settings.tls.mode
        return Address(self._host, server.port, server.secret, ranks, tls)

    def autoscaling_stats(self) -> dict[str, float]:
        """Return the input of kvroute/autoscaling.py."""
        refused, self._refusals = self._server.refusals - self._refusals, self._server.refusals
        return autoscaling_stats(self._ranks, time.monotonic()) | {"refusing": float(refused > 0)}

    async def check(self) -> None:
        """Raise an error if the engine or a background task has failed."""
        await self._check_engines()
        for task in self._tasks:
            if task.done():
                # This raises the task's error. Without the task, the index would become wrong.
                task.result()

    @property
    def is_busy(self) -> bool:
        """Return whether a request runs."""
        return self._server.running > 0

    async def close(self, *, at_once: bool = False) -> None:
        """Close everything after all requests have finished; at once: their answers end."""
        self._server.stop()
        if not at_once:
            await self._server.idle()
            await self._stay()
        await self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._leave()
        if self._exposition:
            await asyncio.to_thread(self._exposition.close)
        await self._redis.aclose()
        for rank in self._ranks:
            await rank.engine.close()

    async def _generate(self, request: GenerateRequest, emit: Emit) -> None:
        async with self._features.around(request) as request:
            await self._ranks[request.rank].generate(request, emit)

    async def _unstarted(self, request_ids: bytes, rank: int) -> bytes:
        """Return those of these requests that wait in the engine's queue.

        Args:
            request_ids: Encoded ids of requests.
            rank: The number of the rank that got them.
        """
        waiting = await self._ranks[rank].engine.unstarted(decode_ids(request_ids))
        return encode_ids(waiting)

    async def _render(self, call: bytes, rank: int) -> bytes:
        """Render the prompt of an HTTP request that the router cannot render, and return it."""
        return encode_rendered(await self._ranks[rank].engine.render(decode_call(call)))

    async def _http(self, call: bytes, rank: int) -> bytes:
        """Return the response to an HTTP request that generates no tokens, in one piece."""
        http = decode_call(call)
        request = GenerateRequest(
            *(f"{http.request_id}-0", NO_TOKENS, http.namespace),
            variant=http.variant,
            call=http,
            rank=rank,
        )
        chunks: list[Chunk] = []
        async with self._features.around(request) as request:
            await self._ranks[rank].engine.generate(request, chunks.append)
        return encode_part(joined_parts([chunk.http for chunk in chunks if chunk.http]))

    async def _stay(self) -> None:
        """Wait until routers need this replica no more: they close their connections then."""
        if not (stays_s := self._features.stays_s()):
            return
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._drained_s + stays_s):
                await self._server.alone()

    async def _expose(self) -> Exposition | None:
        return await asyncio.to_thread(
            expose,
            self._surroundings.address,
            self._metrics.registry,
            ports=self._settings.metrics_ports,
            token_file=self._settings.metrics_token_file,
        )

    def _make_ranks(self, engines: Sequence[Engine], index: Index) -> list[Rank]:
        settings, location = self._settings, self._location()
        identity = identify(
            resolve(settings.model),
            revision=settings.revision,
            block_size=engines[0].facts.block_size,
            variants=digests(settings.adapters),
        )
        return [
            Rank(
                engine,
                index,
                self._metrics,
                self._tracing,
                rank_id=rank_id,
                description=Description(
                    engine.facts, identity, location, settings.served_model_name
                ),
                lease_s=settings.lease_s,
                is_shared=self._is_shared,
                reports=partial(self._reports, number),
            )
            for number, (rank_id, engine) in enumerate(
                zip(rank_ids(self.id, len(engines)), engines, strict=True)
            )
        ]

    def _methods(self) -> dict[str, Method]:
        return {
            "render": self._render,
            "http": self._http,
            "unstarted": self._unstarted,
        }

    def _reports(self, rank: int) -> dict[str, bytes]:
        """Return what features report about a rank, by name."""
        return self._features.reports(rank)

    def _location(self) -> ProcessLocation:
        metrics = self._exposition.address if self._exposition else None
        return ProcessLocation(self._surroundings.address, os.getpid(), metrics)

    async def _keep_index(self) -> None:
        """Publish the replica until it drains, then remove it from the index.

        After that, routers send it no new requests.
        """
        async with asyncio.TaskGroup() as tasks:
            publishing = [tasks.create_task(rank.keep_in_index()) for rank in self._ranks]
            await self._surroundings.draining()
            self._drained_s = asyncio.get_running_loop().time()
            self._server.stop()
            for publisher in publishing:
                publisher.cancel()
        await self._leave()

    async def _leave(self) -> None:
        await asyncio.gather(*(rank.publisher.leave() for rank in self._ranks))

    async def _check_engines(self) -> None:
        for rank in self._ranks:
            await rank.engine.check()

    async def _report_pending(self) -> None:
        """Keep reporting the number of pending prompt tokens to all connected routers.

        A router that receives all other routers' messages through Redis can compute this number
        itself. A router that does not receive them needs this report.
        """
        while True:
            self._server.report_pending([rank.backlog.pending_tokens for rank in self._ranks])
            await asyncio.sleep(REPORT_INTERVAL_S)

    async def _refuse_while_away(self) -> None:
        """Refuse requests while the engine is away, so that routers send them elsewhere."""
        engine = self._ranks[0].engine
        while True:
            self._server.set_away(await engine.wait_until_away())
            await engine.wait_until_back()
            self._server.set_away("")

    async def _watch_engine(self) -> None:
        """Wait until the engine dies, and report it.

        Callers then get an error at once. Failed health checks of Serve would take many seconds.
        """
        while True:
            await asyncio.sleep(CHECK_INTERVAL_S)
            try:
                await self._check_engines()
            except EngineDeadError as error:
                self._on_death(error)
                raise
