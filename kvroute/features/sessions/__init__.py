"""Ends of sessions: clients say that a session has ended, and all replicas get to know it.

README.md explains the parts. Which session a prompt belongs to is no part of this feature.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvroute.features.feature import Feature, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.features.sessions.replica_sessions import ReplicaSessions
    from kvroute.features.sessions.router_sessions import EndedSessions
    from kvroute.router.serving.router_base import RouterBase


class SessionEnds(Feature):
    """The ends of sessions, which clients declare."""

    name = "sessions"
    paths = Paths(use=("/v1/sessions",))

    def router(self, base: "RouterBase") -> "EndedSessions":
        from kvroute.features.sessions.router_sessions import EndedSessions

        return EndedSessions()

    def replica(self, base: "ReplicaBase") -> "ReplicaSessions":
        from kvroute.features.sessions.replica_sessions import ReplicaSessions

        return ReplicaSessions(base.ranks)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.sessions.session_routes import routes

        return [routes]
