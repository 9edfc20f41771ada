"""The pulls and hand-overs of one model in one router: what the core calls."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import TYPE_CHECKING, Any, get_args

from prometheus_client import CollectorRegistry, Counter

from kvroute.features.figure import Figure
from kvroute.features.pulls.hand_over import HandOver
from kvroute.features.pulls.peer_pulls import PlannedPulls, PullAccess
from kvroute.features.router_feature import RouterFeature
from kvroute.replica.fabric.pull import PullResult, Reason, pull_key
from kvroute.wording import plural

if TYPE_CHECKING:
    from kvroute.features.pulls.pull_options import PullOptions
    from kvroute.process.exposition import Readings
    from kvroute.router.dispatch.generation import Generation
    from kvroute.router.serving.assembly import Parts
    from kvroute.router.serving.router_base import RouterBase

# Explains the figure.
ABOUT = "How fast replicas copy cached blocks from each other, over the slowest link of each."
COMPLETE = "complete"  # label of pulls that copied all blocks
UNKNOWN = "unknown"  # label of pulls of which no result came, for example of a lost replica
RESULTS = (COMPLETE, *(reason for reason in get_args(Reason) if reason), UNKNOWN)


class PullMetrics:
    """Counts pulls by result, and what they copied."""

    def __init__(self, registry: CollectorRegistry) -> None:
        pulls = Counter(
            "kvroute_pulls",
            "Pulls from another replica's host memory that the router ordered, by result: "
            + ", ".join(RESULTS)
            + ".",
            ["result"],
            registry=registry,
        )
        self._pulls = {result: pulls.labels(result) for result in RESULTS}
        self._tokens = Counter(
            "kvroute_pulled_tokens", "Prompt tokens whose blocks were pulled.", registry=registry
        )
        self._bytes = Counter("kvroute_pulled_bytes", "Bytes that were pulled.", registry=registry)
        self._seconds = Counter(
            "kvroute_pull_seconds",
            "Seconds that pulls took. Bytes divided by these seconds are the speed of the links.",
            registry=registry,
        )

    def count(self, result: PullResult | None) -> None:
        """Count a pull; None: its result is unknown."""
        if result is None:
            self._pulls[UNKNOWN].inc()
            return
        self._pulls[result.reason or COMPLETE].inc()
        self._tokens.inc(result.tokens)
        self._bytes.inc(result.size_bytes)
        self._seconds.inc(result.took_s)


class RouterPulls(PlannedPulls, RouterFeature):
    """The pulls of this router's requests, and what removed replicas hand over."""

    hand_over: HandOver  # from `attach` on

    def __init__(self, base: "RouterBase", options: "PullOptions") -> None:
        super().__init__()
        # Other policies ignore caches.
        self._within_s = options.hand_over_s if base.settings.policy == "kvroute" else 0.0
        self._metrics: PullMetrics | None = None  # None: metrics are off

    def attach(self, parts: "Parts") -> None:
        self._links = parts.links
        self.hand_over = HandOver(
            parts.fleet, self, parts.links, parts.liveness.trusted, within_s=self._within_s
        )

    def metrics(self, registry: CollectorRegistry, readings: "Readings") -> None:
        self._metrics = PullMetrics(registry)
        readings.labelled_counter(
            "result",
            "kvroute_handed_over_prompts",
            "Latest prompts of conversations whose replica was removed, by result: moved (another "
            "replica has pulled the blocks), held (another replica had them already), dropped (the "
            "conversation ended or continued, or the blocks were evicted or are not worth a pull), "
            "late (the time was over).",
            lambda: {str(result): count for result, count in self.hand_over.outcomes.items()},
        )
        readings.counter(
            "kvroute_handed_over_tokens",
            "Prompt tokens whose blocks other replicas have pulled from removed ones.",
            lambda: self.hand_over.tokens,
        )

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        return {"hand-over": self.hand_over.run()}

    def access(self, rank_id: str) -> PullAccess | None:
        address = self._links.address(rank_id)
        return PullAccess(pull_key(address.secret), address.tls) if address else None

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
