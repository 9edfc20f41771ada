"""Our order of replicas reaches Ray Serve: the only file that touches its alpha routing API.

Serve's own loop (ask `choose_replicas`, probe queues, match requests to answers) hangs a client when
the choice raises, spins without a pause when every replica is full, and livelocks when one request
fans out. Overriding the step around it avoids all three: an exception reaches the caller, waiting
is done here, and each request gets the replica that was chosen for it.
"""

import asyncio
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

FIRST_PAUSE_S = 0.025  # when every replica refused, doubling
LONGEST_PAUSE_S = 0.5


@dataclass(slots=True, weakref_slot=True)
class Route:
    """Where a request should go, best first; and where it went."""

    ranking: Sequence[str]  # replica ids
    refused: set[str] = field(default_factory=set)  # full, or dead, when they were asked
    chosen: str | None = None
    pauses: int = 0

    def next(self, running: Collection[str]) -> str | None:
        """The best replica not yet asked; None when all of them refused."""
        for replica_id in self.ranking:
            if replica_id in running and replica_id not in self.refused:
                return replica_id
        unranked = set(running).difference(self.ranking, self.refused)
        return random.choice(list(unranked)) if unranked else None


# The router object and the ingress share a process, not a call: Serve hands over arguments alone.
ROUTES: WeakValueDictionary[str, Route] = WeakValueDictionary()  # by request id
_routers: list["CacheAwareRequestRouter"] = []


def running_replicas() -> list[str]:
    """Ids of the replicas that Serve would send a request to now."""
    return [replica_id for router in _routers[-1:] for replica_id in router.running]


class CacheAwareRequestRouter(RequestRouter):
    """Takes each request's Route in its order."""

    def initialize_state(self) -> None:
        self.running: dict[str, RunningReplica] = {}
        _routers.append(self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.running = {replica.replica_id.unique_id: replica for replica in replicas}

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)  # once for each request that was there
        self.running.pop(replica_id.unique_id, None)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        raise NotImplementedError("routes are taken in _choose_replica_for_request")

    async def _choose_replica_for_request(
        self, pending_request: PendingRequest, *, is_retry: bool = False
    ) -> RunningReplica:
        """The route's next replica. `is_retry`: the last one refused, or died before it began."""
        route = ROUTES.get(pending_request.args[0].request_id) or Route(ranking=())
        if is_retry and route.chosen is not None:
            route.refused.add(route.chosen)
        while True:
            route.chosen = route.next(self.running)
            if route.chosen is not None:
                return self.running[route.chosen]
            await self._pause(route)

    async def _pause(self, route: Route) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**route.pauses))
        route.pauses += 1
        route.refused.clear()
