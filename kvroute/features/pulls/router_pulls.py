"""The pulls and hand-overs of one model in one router: what the core calls."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvroute.contract.pull import PullAccess, PullResult
from kvroute.features.figure import Figure
from kvroute.features.pulls import pull_metrics
from kvroute.features.pulls.hand_over import HandOver
from kvroute.features.pulls.peer_pulls import PlannedPulls
from kvroute.features.router_feature import RouterFeature
from kvroute.wording import plural

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvroute.features.pulls.pull_options import PullOptions
    from kvroute.process.exposition import Readings
    from kvroute.router.dispatch.generation import Generation
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.router_base import RouterBase

# Explains the figure.
ABOUT = "How fast replicas copy cached blocks from each other, over the slowest link of each."


class RouterPulls(PlannedPulls, RouterFeature):
    """The pulls of this router's requests, and what removed replicas hand over."""

    hand_over: HandOver  # from `attach` on

    def __init__(self, base: "RouterBase", options: "PullOptions") -> None:
        super().__init__()
        # Other policies ignore caches.
        self._within_s = options.hand_over_s if base.settings.policy == "kvroute" else 0.0
        self._metrics: pull_metrics.PullMetrics | None = None  # None: metrics are off

    def attach(self, parts: "Parts") -> None:
        self._links = parts.links
        self.hand_over = HandOver(
            parts.fleet, self, parts.links, parts.liveness.trusted, within_s=self._within_s
        )

    def metrics(self, registry: "CollectorRegistry", readings: "Readings") -> None:
        self._metrics = pull_metrics.PullMetrics(registry)
        pull_metrics.export(self.hand_over, readings)

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"hand-over": self.hand_over.run()}

    def access(self, rank_id: str) -> PullAccess | None:
        return self._links.pull_access(rank_id)

    def count(self, result: PullResult | None) -> None:
        if self._metrics is not None:
            self._metrics.count(result)

    def started(self, generation: "Generation") -> None:
        self.hand_over.remember(generation)

    def state(self) -> Mapping[str, Any] | None:
        """Return how fast each replica pulls (peer_pulls.py: PullRate), by its id."""
        speeds = {id_: speed._asdict() for id_, speed in self.speeds().items()}
        return {"speeds": speeds} if speeds else None

    async def figures(self) -> Sequence[Figure]:
        speeds = [speed.bytes_per_s / 1e9 for speed in self.speeds().values()]
        if not speeds:
            return ()
        note = f"{plural(len(speeds), 'replica')} can pull, the slowest at {min(speeds):.2g} GB/s"
        return [Figure("Fastest pull", f"{max(speeds):.2g} GB/s", note, ABOUT)]
