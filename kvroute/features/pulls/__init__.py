"""Pulls: replicas copy blocks of a prompt from the host memory of other replicas.

README.md explains the parts. How an engine copies blocks is no part of this feature.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar

from kvroute.features.feature import Feature, FeatureSettings, State, TermText

if TYPE_CHECKING:
    from pydantic import BaseModel

    from kvroute.doctor.checks import Check
    from kvroute.features.pulls.peer_pulls import PlannedPulls
    from kvroute.features.pulls.replica_pulls import ReplicaPulls
    from kvroute.features.pulls.router_pulls import RouterPulls
    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.router.serving.router_base import RouterBase
    from kvroute.settings.needs import Need


class Pulling(Feature):
    """The pulls between replicas. They are off without --pull on."""

    name = "pulls"
    has_state = True
    policies = ("never-pull", "always-pull")
    terms: ClassVar[Mapping[str, TermText]] = {
        "pull": TermText(
            label="blocks from another replica",
            reason="{other} would wait {seconds} longer for blocks from another replica's host "
            "memory",
            chosen="{id} pulls {tokens} tokens from {source}; this takes {seconds}.",
        )
    }

    def options(self) -> "type[BaseModel]":
        from kvroute.features.pulls.pull_options import PullOptions

        return PullOptions

    def settings(self, options: Any) -> FeatureSettings:
        values = {"pull": options.pull, "hand_over_s": options.hand_over_s}
        return FeatureSettings(values, values)

    def needs(self) -> "Sequence[Need]":
        from kvroute.settings.needs import HOST_CACHE, Need, has_host_cache

        return [
            Need(("pull",), has_host_cache, HOST_CACHE),
            Need(("hand_over_s",), lambda options: options.pull == "on", "--pull on"),
        ]

    def router(self, base: "RouterBase") -> "RouterPulls | None":
        from kvroute.features.pulls.pull_options import PullOptions
        from kvroute.features.pulls.router_pulls import RouterPulls

        options = base.settings.of(self.name, PullOptions)
        return RouterPulls(base, options) if options.pull == "on" else None

    def replica(self, base: "ReplicaBase") -> "ReplicaPulls":
        from kvroute.features.pulls.pull_options import PullOptions
        from kvroute.features.pulls.replica_pulls import ReplicaPulls

        return ReplicaPulls(base, base.settings.in_replica(self.name, PullOptions))

    def replayed(self, policy: str = "") -> "PlannedPulls | None":
        from kvroute.features.pulls.peer_pulls import REPLAYED, PlannedPulls

        kind = REPLAYED.get(policy, PlannedPulls)
        return kind() if kind else None

    def checks(self, found: Sequence[State] | None) -> "Iterator[Check]":
        from kvroute.features.pulls.pull_checks import pulls

        speeds = chain.from_iterable(state["speeds"].items() for state in found or ())
        return pulls(dict(speeds))
