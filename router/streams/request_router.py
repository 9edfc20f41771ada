"""Our order of replicas reaches Ray Serve: the only file that touches its alpha routing API.

Serve's own loop (ask `choose_replicas`, probe queues, match requests to answers) hangs a client
when the choice raises, spins without a pause when every replica is full, and livelocks when one
request fans out. Overriding the step around it avoids all three: an exception reaches the caller,
waiting is done here, and each request gets the replica that was chosen for it.
"""

import asyncio
from collections.abc import Collection
from weakref import WeakValueDictionary

import ray
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from router.streams import routes

FIRST_PAUSE_S = 0.025  # when every replica refused, doubling
LONGEST_PAUSE_S = 0.5


class CacheAwareRequestRouter(RequestRouter):
    """Takes each request's Route in its order. Also a routes.Replicas."""

    def initialize_state(self) -> None:
        self.running: dict[str, RunningReplica] = {}
        self.known: WeakValueDictionary[str, RunningReplica] = WeakValueDictionary()
        routes.report(self._deployment_id.name, self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.running = {replica.replica_id.unique_id: replica for replica in replicas}
        self.known.update(self.running)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)  # once for each request that was there
        self.running.pop(replica_id.unique_id, None)

    def ids(self) -> Collection[str]:
        return self.running

    async def ask(self, replica_id: str) -> None:
        """A thread of its own answers in the replica's process, whatever its event loop does."""
        if replica := self.known.get(replica_id):
            await replica.get_queue_len(deadline_s=0)  # of no effect

    async def kill(self, replica_id: str) -> None:
        if replica := self.known.get(replica_id):
            await asyncio.to_thread(ray.kill, replica._actor_handle)  # waits for the process's end

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
        request_id = pending_request.args[0].request_id
        route = routes.ROUTES.get(request_id) or routes.Route(ranking=())
        if is_retry and route.chosen is not None:
            route.refused.add(route.chosen)
        while True:
            route.chosen = route.next(self.running)
            if route.chosen is not None:
                route.handle = self.running[route.chosen]
                return self.running[route.chosen]
            await self._pause(route)

    async def _pause(self, route: routes.Route) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**route.pauses))
        route.pauses += 1
        route.refused.clear()
