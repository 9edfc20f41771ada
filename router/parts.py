"""One router's parts, each given those it needs, and the tasks that keep them current."""

import asyncio
import random
import time
from collections.abc import Coroutine
from typing import Any

import ray
from ray.serve.handle import DeploymentHandle

from replica.exposition import Exposition
from replica.identity import identify
from replica.kvindex.index import Index, connect
from replica.kvindex.prefixes import Prefix, Prefixes
from router import routes
from router.audit import Audit, asking
from router.auto_pin import AutoPin
from router.baselines import RANKINGS
from router.demand import Demand
from router.dispatch import Dispatcher, Generation
from router.feed import Feed
from router.fleet import Fleet
from router.handshake import Handshake
from router.hot import HotPrefixes
from router.hot_routes import HotRoutes
from router.joint import Joint
from router.metrics import RouterMetrics
from router.peers import Listener, Loudspeaker
from router.prefix_routes import PrefixRoutes
from router.prefixes import Catalogue
from router.prompt import Prompts
from router.request_log import RequestLog
from router.settings import RouterSettings
from router.targets import Announcer
from router.trips import Witnesses
from router.watch import Watch

LOADED_S = 5.0  # the longest that a new router waits for what the fleet's caches hold


class Parts:
    """Nothing runs before `start`, and nothing after `close`."""

    def __init__(
        self, settings: RouterSettings, replicas: DeploymentHandle, prompts: Prompts
    ) -> None:
        model, block_size = settings.served_model_name, settings.block_size
        redis = connect(settings.redis_url)
        self.adapters = {adapter.name: adapter for adapter in settings.adapters}  # LoRA
        self._settings = settings
        self._prompts = prompts
        self._loudspeaker = Loudspeaker()
        self.id = self._loudspeaker.router
        self._log = self._request_log()
        self._metrics = RouterMetrics() if settings.metrics else None
        self.fleet = Fleet(
            model=model,
            revision=settings.revision,
            block_size=block_size,
            rng=random.Random(),
            handshake=Handshake(
                identify(
                    prompts.model,
                    revision=settings.revision,
                    block_size=block_size,
                    adapters=settings.adapters,
                )
            ),
            witness=Witnesses(*filter(None, (self._loudspeaker, self._log, self._metrics))),
            ranking=RANKINGS[settings.policy](),
        )
        self.index = Index(redis, model)
        self.feed = Feed(self.index, self.fleet)
        self.watch = Watch(routes.replicas, self.fleet, hang_timeout_s=settings.hang_timeout_s)
        self.dispatcher = Dispatcher(replicas, self.fleet, self.watch)
        self.audit = Audit(self.index, self.feed, self.fleet.mirror, asking(replicas))
        self.joint = Joint(prompts)
        self.catalogue = Catalogue(Prefixes(redis, model), self.fleet, block_size=block_size)
        self.demand = Demand(self.catalogue, self.fleet)
        self.hot = HotPrefixes(block_size=block_size)
        self.hot_routes = HotRoutes(self.hot, self.fleet, self.catalogue, prompts)
        self.prefix_routes = PrefixRoutes(
            self.catalogue, self.joint, self.index.records, block_size=block_size
        )
        self._announcer: Announcer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when the first request will be placed well, or after LOADED_S."""
        settings = self._settings
        self._run(self.feed.run(), "feed")
        self._run(self._loudspeaker.run(self.index), "loudspeaker")
        self._run(Listener(self.fleet, own=self.id).run(self.index), "listener")
        self._run(self.watch.run(), "watch")
        self._run(self.demand.run(), "demand")
        self._run(self.catalogue.run(settings.tasks, self.joint), "catalogue")
        if settings.auto_pin:
            auto_pin = AutoPin(self.hot, self.fleet, self.catalogue, self._prompts)
            self._run(auto_pin.run(), "auto-pin")
        if self._log:
            self._run(self._log.run(), "request log")
        if self._metrics:
            self._announcer = await self._announce(self._metrics)
            self._run(self._announcer.run(), "announcer")
        await self.feed.loaded(within_s=LOADED_S)

    def lora(self, asked: str | None) -> str | None:
        """The LoRA adapter that a client asks for as `adapter` or `model:adapter`; empty: the model
        itself, None: neither is served here."""
        model = self._settings.served_model_name
        if asked in (None, model):
            return ""
        name = asked.removeprefix(f"{model}:")
        return name if name in self.adapters else None

    def count(self, generation: Generation, prefix: Prefix | None, *, is_apart: bool) -> None:
        """A prompt has its first token: what it took from caches counts for its prefixes. One that
        shares nothing, by its salt or its adapter, makes no prefix hot."""
        if prefix is not None:
            self.catalogue.count(prefix, generation.cached_tokens)
            self.demand.count(prefix)
        if not is_apart:
            chain, now_s = generation.placement.chain, time.monotonic()
            self.hot.see(generation.token_ids, chain, generation.cached_tokens, now_s)

    def check(self) -> None:
        """Raises what ended a task: none of them ends by itself."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        self._prompts.close()
        if self._log:
            await self._log.flush()
        if self._announcer:
            await self._announcer.leave()

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self._tasks.append(asyncio.create_task(work, name=name))

    def _request_log(self) -> RequestLog | None:
        folder = self._settings.request_log
        if folder is None:
            return None
        return RequestLog(folder / f"{self.id}.jsonl", block_size=self._settings.block_size)

    async def _announce(self, metrics: RouterMetrics) -> Announcer:
        """Metrics are told from now on."""
        metrics.watch(self.fleet, self.feed)
        if self._log:
            metrics.watch_log(self._log)
        node = ray.util.get_node_ip_address()
        exposition = await asyncio.to_thread(Exposition, node)
        return Announcer(self.index, self.id, exposition, node)
