"""A router's telemetry for one model: request observers, and the tasks that publish their data."""

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from urllib.parse import quote

from prometheus_client import CollectorRegistry

from kvroute.contract.unreadable import Unreadable
from kvroute.features.router_feature import RouterFeature
from kvroute.process.exposition import Process, Readings
from kvroute.process.metrics_port import expose
from kvroute.router.connections.links import Links
from kvroute.router.dispatch.blamed import PoisonList
from kvroute.router.index.feed import Feed
from kvroute.router.observability import request_spans
from kvroute.router.observability.metrics import RouterMetrics
from kvroute.router.observability.observers import RequestObservers
from kvroute.router.observability.queue_report import RecentWaits
from kvroute.router.observability.recent_requests import RecentAnswers, RecentTokens
from kvroute.router.observability.request_log import RequestLog
from kvroute.router.observability.targets import Announcer
from kvroute.router.placement.attempts import RequestObserver
from kvroute.router.placement.fleet import Fleet
from kvroute.router.queueing.queue import Queue
from kvroute.settings.router import RouterSettings
from kvroute.store.index import Index


class Telemetry:
    """Metrics, request log, spans, and sums of the last minutes."""

    def __init__(
        self,
        router_id: str,
        settings: RouterSettings,
        *,
        additional: RequestObserver,
        features: Sequence[RouterFeature],
        ranks: Callable[[], int],
    ) -> None:
        """Create the observers that the settings require.

        Args:
            additional: the observer of the router's other parts, which is called first.
            ranks: returns how many ranks get requests at the moment.
        """
        self.recent_tokens = RecentTokens()
        self.recent_waits = RecentWaits()
        self.recent_answers = RecentAnswers()
        self._router_id = router_id
        self._settings = settings
        self._log = _request_log(router_id, settings, ranks)
        self._registry = CollectorRegistry()  # one for each model, since a router may serve several
        self._metrics = RouterMetrics(self._registry) if settings.metrics else None
        self._announcer: Announcer | None = None
        self._features = features
        observers = (
            additional,
            self._log,
            self._metrics,
            self.recent_tokens,
            self.recent_waits,
            self.recent_answers,
            *(feature.observer for feature in features),
            request_spans.dispatches(),
        )
        self.observer = RequestObservers(*filter(None, observers))

    @property
    def readings(self) -> Readings | None:
        """Return the metrics that are read at scrape time; None: metrics are off."""
        return self._metrics.readings if self._metrics else None

    async def start(
        self,
        index: Index,
        node: str,
        *,
        fleet: Fleet,
        feed: Feed,
        unreadable: Unreadable,
        links: Links,
        blamed: PoisonList,
        queue: Queue[Any],
    ) -> None:
        """Serve the metrics and write their address to the index, unless metrics are off.

        Args:
            node: the address of this machine.
        """
        if self._metrics is None:
            return
        self._metrics.export(fleet, feed)
        self._metrics.export_unreadable(unreadable)
        self._metrics.export_links(links)
        self._metrics.export_blamed(blamed)
        self._metrics.export_queue(queue)
        for feature in self._features:
            feature.metrics(self._registry, self._metrics.readings)
        if self._log:
            self._metrics.export_log(self._log)
        self._registry.register(Process())
        exposition = await asyncio.to_thread(
            expose,
            node,
            self._registry,
            ports=self._settings.metrics_ports,
            token_file=self._settings.metrics_token_file,
        )
        if exposition is not None:
            self._announcer = Announcer(index, self._router_id, exposition, node)

    def tasks(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the background tasks by name. Call `start` first."""
        workers = {
            "request log": self._log,
            "announcer": self._announcer,
        }
        return {name: worker.run() for name, worker in workers.items() if worker}

    def refused(self, error: Exception) -> None:
        """Count an error that a client gets instead of a response."""
        self.observer.refused(error)

    def refused_by_engine(self) -> None:
        """Count an error of a replica that a client got instead of a response."""
        if self._metrics:
            self._metrics.refused_by_engine()

    async def close(self) -> None:
        """Write what is left of the log, and remove the metrics' address."""
        if self._log:
            await self._log.flush()
        if self._announcer:
            await self._announcer.leave()


def _request_log(
    router_id: str, settings: RouterSettings, ranks: Callable[[], int]
) -> RequestLog | None:
    """Return the request log; None if it is off."""
    if settings.request_log is None:
        return None
    model = settings.served_model_name
    file = settings.request_log / f"{router_id}-{quote(model, safe='')}.jsonl"
    return RequestLog(file, model=model, block_size=settings.block_size, ranks=ranks)
