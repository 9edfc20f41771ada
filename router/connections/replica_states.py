"""The state of each replica, by name: the one source of /health and the commands."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Literal

from kvroute.contract.ranks import replica_of, replicas_of
from kvroute.router.connections.deployed import DeployedReplicas
from kvroute.router.connections.links import Links
from kvroute.router.connections.liveness import Liveness
from kvroute.router.connections.replica_source import Deployed
from kvroute.router.placement.fleet import Fleet

State = Literal[
    "ready",  # it gets requests
    "degraded",  # it gets requests, but routers ignore its cache
    "silent",  # it is connected, but does not answer
    "away",  # it is connected, but its engine, an attached server, does not answer
    "starting",  # Ray Serve starts it, or this router has not connected to it yet
    "lost",  # the connection to it has ended, and Ray Serve has not replaced it yet
    "leaving",  # it finishes its requests, and gets no new ones
    "elsewhere",  # it is in the index, but Ray Serve does not run it in this deployment
]
READY: Collection[State] = ("ready", "degraded")
MISSING: Collection[State] = ("silent", "away", "starting", "lost")  # wanted, but not ready


@dataclass(frozen=True, slots=True)
class ReplicaStates:
    """The replicas of one model, as one router sees them."""

    wanted: int | None  # number of replicas that Ray Serve tries to reach; None: it does not answer
    by_id: Mapping[str, State]  # by the id of a rank; of a replica, if its ranks are not known yet

    @property
    def ready(self) -> int:
        """Return the number of replicas that get requests."""
        return len(replicas_of(id_ for id_, state in self.by_id.items() if state in READY))

    @property
    def missing(self) -> dict[str, State]:
        """Return the state of each replica that is wanted and not ready, by its id."""
        return {replica_of(id_): state for id_, state in self.by_id.items() if state in MISSING}


class StatesReader:
    """Determines the states from what this router and Ray Serve's controller know."""

    def __init__(
        self, links: Links, liveness: Liveness, fleet: Fleet, deployed: DeployedReplicas
    ) -> None:
        self._links = links
        self._liveness = liveness
        self._fleet = fleet
        self._deployed = deployed

    async def read(self) -> ReplicaStates:
        """Return the state of every replica that Serve runs or that is in the index."""
        deployed, links = await self._deployed.get(), self._links
        running, trusted, away = links.running(), self._liveness.trusted(), links.away()
        return combine(
            deployed,
            indexed=[record.id for record in self._fleet.replicas.records],
            running=running,
            known=[id_ for id_ in running if links.reported_ranks(replica_of(id_))],
            connected=links.connected(),
            trusted=trusted,
            degraded=self._fleet.replicas.degraded.keys() & {*trusted},
            away=[id_ for id_ in trusted if replica_of(id_) in away],
        )


def combine(
    deployed: Deployed | None,
    *,
    indexed: Collection[str],
    running: Collection[str],
    known: Collection[str],
    connected: Collection[str],
    trusted: Collection[str],
    degraded: Collection[str],
    away: Collection[str] = (),
) -> ReplicaStates:
    """Return the state of every replica.

    Args:
        deployed: what Ray Serve's controller says; None: it does not answer.
        indexed: the ranks in the index.
        running: the ranks that Ray Serve has announced to this router as running.
        known: those of them to which the router has had a connection.
        connected: those to which it has one now.
        trusted: those of the connected ones that are not suspected to hang.
        degraded: those of the trusted ones whose cache is ignored.
        away: those of the trusted ones whose engine does not answer.
    """
    in_serve = dict(deployed.states) if deployed else {}
    # A record stays in the index for some seconds after its replica has ended.
    ended = deployed.ended - in_serve.keys() if deployed else frozenset[str]()
    # Serve's announcement of the replicas that run may be older than the controller's list.
    removed = {*running} - {*known, *connected} if deployed else set[str]()
    removed = {id_ for id_ in removed if replica_of(id_) not in in_serve}
    ranks = [id_ for id_ in {*indexed, *running} - removed if replica_of(id_) not in ended]
    unregistered = in_serve.keys() - replicas_of(ranks)
    states = {
        id_: _unconnected(
            in_serve.get(replica_of(id_)), is_known=id_ in known, is_running=id_ in running
        )
        for id_ in (*ranks, *unregistered)
    }
    states |= dict.fromkeys(connected, "silent")
    states |= dict.fromkeys(trusted, "ready")
    states |= dict.fromkeys(degraded, "degraded")
    states |= dict.fromkeys(away, "away")
    return ReplicaStates(deployed.wanted if deployed else None, states)


def _unconnected(in_serve: str | None, *, is_known: bool, is_running: bool) -> State:
    """Return the state of a replica to which the router has no connection."""
    if in_serve == "STOPPING":
        return "leaving"
    if is_known:
        return "lost"
    return "starting" if is_running or in_serve else "elsewhere"
