"""What a feature does in the router of one model. Each method has an empty default."""

from collections.abc import Coroutine, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from kvroute.features.placing_feature import PlacingFeature

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvroute.contract.generation import TokenIds
    from kvroute.features.opening import Opening
    from kvroute.process.exposition import Readings
    from kvroute.router.api.calls import Call
    from kvroute.router.serving.assembly import Parts


class RouterFeature(PlacingFeature):
    """One feature of one model in one router. It may import the core, and no other feature."""

    # Its life, in this order.

    def attach(self, parts: "Parts") -> None:
        """Keep the parts of the router that it uses. All of them are built now."""

    def metrics(self, registry: "CollectorRegistry", readings: "Readings") -> None:
        """Export its metrics; called once, unless metrics are off."""

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return its background tasks by name. None of them ends by itself."""
        return {}

    # The requests of clients to this router.

    async def opening(self, call: "Call") -> "Opening | None":
        """Return the beginning that it adds to the prompts of a call; None: it adds none.

        The first feature that adds one is the only one.

        Raises:
            ApiError: the call names a beginning that does not exist.
        """
        return None

    def shared_tokens(self, token_ids: "TokenIds") -> int:
        """Return how many leading tokens of a prompt all namespaces share in the caches."""
        return 0

    # What operators see.

    def state(self) -> Mapping[str, Any] | None:
        """Return its state as JSON, for GET /v1/cluster, the live page and the doctor."""
        return None

    async def live(self) -> Mapping[str, Any] | None:
        """Return what only the live page shows of it, as JSON; None: nothing."""
        return None

    def sample(self) -> Mapping[str, float | None]:
        """Return values for the charts of the live page, which are sampled every ten seconds."""
        return {}


async def live_states(features: Iterable[RouterFeature]) -> dict[str, Mapping[str, Any]]:
    """Return what only the live page shows of features, by name."""
    states = {feature.name: await feature.live() for feature in features}
    return {name: state for name, state in states.items() if state is not None}
