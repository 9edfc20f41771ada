"""One router's parts for one model, each given those it needs; the tasks that keep them current."""

import asyncio
import random
from collections.abc import Coroutine
from functools import partial
from typing import Any
from urllib.parse import quote

import ray
from prometheus_client import CollectorRegistry
from ray.serve.handle import DeploymentHandle

from replica.draining import draining
from replica.exposition import Exposition, Process
from replica.identity import identify
from replica.kvindex.index import Index, connect
from replica.kvindex.prefixes import Prefixes
from router.api.prompt import Prompts
from router.insight import tracing
from router.insight.audit import Audit, asking
from router.insight.canary import Canaries, sending
from router.insight.live import Live
from router.insight.metrics import RouterMetrics
from router.insight.recent import Recent
from router.insight.request_log import RequestLog
from router.insight.targets import Announcer
from router.insight.view import View
from router.prefix_parts import PrefixParts
from router.routing.baselines import RANKINGS
from router.routing.feed import Feed
from router.routing.fleet import Fleet
from router.routing.handshake import Handshake
from router.routing.peers import Listener, Loudspeaker
from router.routing.trips import Witness, Witnesses
from router.settings import RouterSettings
from router.streams import routes
from router.streams.dispatch import Dispatcher
from router.streams.watch import Watch

UNKNOWN_CONTEXT = 2**31  # tokens; until a replica has told its own
LOADED_S = 5.0  # the longest that a new router waits for what the fleet's caches hold


class Parts:
    """Nothing runs before `start`, and nothing after `close`. id_: the router's."""

    def __init__(
        self, id_: str, settings: RouterSettings, replicas: DeploymentHandle, prompts: Prompts
    ) -> None:
        redis = connect(settings.redis_url)
        self.id = id_
        self.model = settings.served_model_name
        self.adapters = {adapter.name: adapter for adapter in settings.adapters}  # LoRA
        self.settings = settings
        self._prompts = prompts
        self._deployment = replicas.deployment_name
        self._loudspeaker = Loudspeaker(id_)
        self._log = self._request_log()
        self._registry = CollectorRegistry()  # not the process's, which may serve other models
        self._metrics = RouterMetrics(self._registry) if settings.metrics else None
        self.recent = Recent()
        heard = (self._loudspeaker, self._log, self._metrics, self.recent, tracing.dispatches())
        self.fleet = _fleet(settings, prompts, Witnesses(*filter(None, heard)))
        self.index = Index(redis, self.model)
        self.feed = Feed(self.index, self.fleet)
        self.watch = Watch(
            partial(routes.replicas, self._deployment),
            self.fleet,
            hang_timeout_s=settings.hang_timeout_s,
        )
        self.dispatcher = Dispatcher(replicas, self.fleet, self.watch)
        self.audit = Audit(self.index, self.feed, self.fleet.mirror, asking(replicas))
        self.canaries = Canaries(
            self.index,
            self.fleet,
            sending(replicas),
            lambda: self.running,
            block_size=settings.block_size,
        )
        store = Prefixes(redis, self.model)
        self.prefixes = PrefixParts(settings, store, self.index, self.fleet, prompts)
        self._listener = Listener(self.fleet, own=self.id)
        self.live = self._live() if settings.ui else None  # None: it is off
        self._announcer: Announcer | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Returns when the first request will be placed well, or after LOADED_S."""
        self._run(self.feed.run(), "feed")
        self._run(self._loudspeaker.run(self.index), "loudspeaker")
        self._run(self._listener.run(self.index), "listener")
        self._run(self.watch.run(), "watch")
        for name, work in self.prefixes.work().items():
            self._run(work, name)
        if self._log:
            self._run(self._log.run(), "request log")
        if self._metrics:
            self._announcer = await self._announce(self._metrics)
            self._run(self._announcer.run(), "announcer")
        await self.feed.loaded(within_s=LOADED_S)

    def lora(self, asked: str | None) -> str | None:
        """The LoRA adapter that a client asks for as `adapter` or `model:adapter`; empty: the model
        itself, None: neither is served here."""
        if asked in (None, self.model):
            return ""
        name = asked.removeprefix(f"{self.model}:")
        return name if name in self.adapters else None

    def refused(self, error: Exception) -> None:
        """That is what a client got."""
        if self._metrics:
            self._metrics.refused(error)

    @property
    def running(self) -> list[str]:
        """Ids of the replicas that Serve would send a request to now."""
        return routes.running_replicas(self._deployment)

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and answer together."""
        return self.fleet.max_model_len or UNKNOWN_CONTEXT

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
        folder = self.settings.request_log
        if folder is None:
            return None
        file = folder / f"{self.id}-{quote(self.model, safe='')}.jsonl"
        return RequestLog(file, model=self.model, block_size=self.settings.block_size)

    def _live(self) -> Live:
        view = View(
            self.recent,
            self.settings,
            index=self.index,
            fleet=self.fleet,
            feed=self.feed,
            watch=self.watch,
            hot=self.prefixes.hottest,
            peers=self._listener,
        )
        return Live(view.look, draining)

    async def _announce(self, metrics: RouterMetrics) -> Announcer:
        """Metrics are told from now on."""
        metrics.watch(self.fleet, self.feed)
        metrics.watch_prefixes(self.prefixes.catalogue)
        metrics.watch_audit(self.audit)
        if self._log:
            metrics.watch_log(self._log)
        self._registry.register(Process())
        node = ray.util.get_node_ip_address()
        exposition = await asyncio.to_thread(Exposition, node, self._registry)
        return Announcer(self.index, self.id, exposition, node)


def _fleet(settings: RouterSettings, prompts: Prompts, witness: Witness) -> Fleet:
    identity = identify(
        prompts.model,
        revision=settings.revision,
        block_size=settings.block_size,
        adapters=settings.adapters,
    )
    return Fleet(
        model=settings.served_model_name,
        revision=settings.revision,
        block_size=settings.block_size,
        rng=random.Random(),
        handshake=Handshake(identity),
        witness=witness,
        ranking=RANKINGS[settings.policy](),
    )
