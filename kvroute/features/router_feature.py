"""What a feature does in the router of one model. Each method has an empty default."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvroute.features.placing_feature import PlacingFeature

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvroute.process.exposition import Readings


class RouterFeature(PlacingFeature):
    """One feature of one model in one router. It may import the core, and no other feature."""

    def metrics(self, registry: "CollectorRegistry", readings: "Readings") -> None:
        """Export its metrics; called once, unless metrics are off."""

    def state(self) -> Mapping[str, Any] | None:
        """Return its state as JSON, for GET /v1/cluster, the live page and the doctor."""
        return None

    def sample(self) -> Mapping[str, float | None]:
        """Return values for the charts of the live page, which are sampled every ten seconds."""
        return {}
