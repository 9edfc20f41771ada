"""Retention: replicas keep the blocks of conversations that will probably continue.

README.md explains the parts. Which session a prompt belongs to is no part of this feature.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.features.retention.replica_retention import ReplicaRetention
    from kvroute.features.retention.returns import Returns
    from kvroute.features.retention.router_retention import RouterRetention
    from kvroute.router.serving.router_base import RouterBase


class Retention(Feature):
    """The order in which replicas evict blocks, and the ends of sessions, which clients declare."""

    name = "retention"
    policies = ("lru",)
    fields = ("prompt_cache_retention", "prompt_cache_options")
    paths = Paths(use=("/v1/sessions", "/finish_session"))

    def router(self, base: "RouterBase") -> "RouterRetention":
        from kvroute.features.retention.router_retention import RouterRetention

        return RouterRetention()

    def replica(self, base: "ReplicaBase") -> "ReplicaRetention":
        from kvroute.features.retention.replica_retention import ReplicaRetention

        return ReplicaRetention(base.ranks)

    def replayed(self, policy: str = "") -> "Returns | None":
        """Return its side in a replay; None: engines evict what was used longest ago."""
        from kvroute.features.retention.returns import Returns

        return None if policy == "lru" else Returns()

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.retention.session_routes import routes

        return [routes]
