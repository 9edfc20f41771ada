"""Ray Serve sends each request to the replicas in the order of our ranking.

Serve ships this module by value, so state shared with the rest of the router is in plans.py.
"""

import asyncio
from collections.abc import Collection
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.serve.request_router import ReplicaID, RunningReplica

from kvroute.process.ray_internals import OneByOneRequestRouter, actor_of
from kvroute.router.dispatch import plans

FIRST_PAUSE_S = 0.025  # when every replica refused; doubles each time
LONGEST_PAUSE_S = 0.5


class CacheAwareRequestRouter(OneByOneRequestRouter):
    """Follows each request's DispatchPlan. Implements plans.Replicas."""

    def initialize_state(self) -> None:
        self.running: dict[str, RunningReplica] = {}
        self.known: WeakValueDictionary[str, RunningReplica] = WeakValueDictionary()
        plans.register(self.deployment_name, self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.running = {replica.replica_id.unique_id: replica for replica in replicas}
        self.known.update(self.running)

    def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
        super().on_replica_actor_died(replica_id)  # called once for each of its requests
        self.running.pop(replica_id.unique_id, None)

    def ids(self) -> Collection[str]:
        return self.running

    async def probe(self, replica_id: str) -> None:
        """A separate thread in the replica's process answers, even if its event loop is blocked."""
        if replica := self.known.get(replica_id):
            await replica.get_queue_len(deadline_s=0)  # the deadline has no effect

    async def kill(self, replica_id: str) -> None:
        if replica := self.known.get(replica_id):
            await asyncio.to_thread(ray.kill, actor_of(replica))  # waits until the process ends

    async def choose_replica(self, request: Any, *, is_retry: bool) -> RunningReplica:
        """The plan's next replica; waits while all of them refuse."""
        plan = plans.PLANS.get(request.request_id) or plans.DispatchPlan(ranking=())
        if is_retry and plan.chosen is not None:
            plan.refused.add(plan.chosen)
        while True:
            plan.chosen = plan.next(self.running)
            if plan.chosen is not None:
                plan.handle = self.running[plan.chosen]
                return self.running[plan.chosen]
            await self._pause(plan)

    async def _pause(self, plan: plans.DispatchPlan) -> None:
        await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2**plan.pauses))
        plan.pauses += 1
        plan.refused.clear()
