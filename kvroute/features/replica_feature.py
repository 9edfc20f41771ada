"""What a feature does in a replica. Each method has an empty default."""

from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from redis.asyncio import Redis

    from kvroute.contract.records import Warm
    from kvroute.replica.rank import Rank
    from kvroute.settings.replica import ReplicaSettings
    from kvroute.store.index import Index


@dataclass(frozen=True, slots=True, eq=False)
class ReplicaBase:
    """What a replica has when its features are built. All of it can be used at once."""

    settings: "ReplicaSettings"
    redis: "Redis"
    index: "Index"
    ranks: "Sequence[Rank]"  # the engines are started


class ReplicaFeature:
    """One feature in one replica. It may import the core, and no other feature."""

    async def start(self) -> None:
        """Prepare the engines. The replica takes requests when this has returned."""

    def tasks(self) -> Mapping[str, Coroutine[Any, Any, None]]:
        """Return its background tasks by name. None of them ends by itself."""
        return {}

    def pins(self, rank: int) -> "Mapping[str, Warm]":
        """Return which prompts the engine of a rank keeps for it, by the name of the pin."""
        return {}
