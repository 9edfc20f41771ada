"""Audits and canaries: they find out whether routers know what the replicas have cached.

README.md explains the parts.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from kvroute.contract.unreadable import FeatureKind
from kvroute.features.feature import DoctorRequest, Feature, Paths

if TYPE_CHECKING:
    from fastapi import APIRouter

    from kvroute.doctor.checks import Check
    from kvroute.features.audit.replica_audits import ReplicaAudits
    from kvroute.features.audit.router_audits import RouterAudits
    from kvroute.features.replica_feature import ReplicaBase
    from kvroute.router.serving.router_base import RouterBase

UNREADABLE = FeatureKind("audit")
AUDIT, CANARY = "/v1/cluster/audit", "/v1/cluster/canary"


def _canary_checks(body: Mapping[str, Any]) -> "Iterator[Check]":
    from kvroute.features.audit.audit_checks import canaries

    return canaries(body)


def _audit_checks(body: Mapping[str, Any]) -> "Iterator[Check]":
    from kvroute.features.audit.audit_checks import audits

    return audits(body)


class Auditing(Feature):
    """Comparisons of what an engine has cached with what others know of it."""

    name = "audit"
    unreadable: ClassVar[Mapping[FeatureKind, str]] = {
        UNREADABLE: "restart the replica with the router's version"
    }
    misses: ClassVar[Mapping[str, str]] = {"stale": "run the doctor with --audit"}
    paths = Paths(manage=(AUDIT, CANARY))
    doctor_requests = (
        DoctorRequest(
            "canary", "sending each replica a test request", "POST", CANARY, _canary_checks
        ),
        DoctorRequest(
            *("audit", "comparing all counts of blocks", "GET", AUDIT, _audit_checks),
            help="Also compare which blocks the engines have cached with what replicas, Redis and "
            "a router know of it; this stops each engine for some milliseconds.",
        ),
    )

    def router(self, base: "RouterBase") -> "RouterAudits":
        from kvroute.features.audit.router_audits import RouterAudits

        return RouterAudits()

    def replica(self, base: "ReplicaBase") -> "ReplicaAudits":
        from kvroute.features.audit.replica_audits import ReplicaAudits

        return ReplicaAudits(base)

    def routes(self) -> "Sequence[APIRouter]":
        from kvroute.features.audit.audit_routes import routes

        return [routes]
