"""A request router for Ray Serve, from which kvroute learns which replicas run.

No requests pass through it, because kvroute's routers have their own connections to replicas. Ray
Serve sends a pickled copy of this module to each process. So all state that the rest of the router
uses is in serve_source.py.
"""

import asyncio
from collections.abc import Collection
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import RayError
from ray.serve.request_router import RequestRouter, RunningReplica

from kvroute.process.ray_internals import actor_of, deployment_name, routing_stats
from kvroute.router.connections.replica_source import NoReplicaError
from kvroute.router.connections.serve_source import register
from kvroute.wire.address import Address, address_in


class KnownReplicas(RequestRouter):
    """The replicas that Serve runs. Implements serve_source.KnownSet."""

    def initialize_state(self) -> None:
        self.running: dict[str, RunningReplica] = {}  # replica id -> its handle
        # Handles of running replicas, and of removed ones that a caller still holds.
        self.known: WeakValueDictionary[str, RunningReplica] = WeakValueDictionary()
        register(deployment_name(self), self)

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        super().update_replicas(replicas)
        self.running = {replica.replica_id.unique_id: replica for replica in replicas}
        self.known.update(self.running)

    async def choose_replicas(self, *_: Any, **__: Any) -> list[list[RunningReplica]]:
        raise NotImplementedError("routers have their own connections to replicas")

    def ids(self) -> Collection[str]:
        return self.running

    def hold(self, replica_id: str) -> object:
        return self.known.get(replica_id)

    async def address(self, replica_id: str) -> Address:
        if (replica := self.known.get(replica_id)) is None:
            raise NoReplicaError(replica_id)
        try:
            return address_in(await routing_stats(replica))
        except RayError as error:
            raise NoReplicaError(str(error)) from error

    async def probe(self, replica_id: str) -> None:
        """Call a thread of the replica's process that answers even if the event loop is blocked."""
        if replica := self.known.get(replica_id):
            try:
                await replica.get_queue_len(deadline_s=0)  # the deadline has no effect
            except RayError as error:
                raise NoReplicaError(str(error)) from error

    async def kill(self, replica_id: str) -> None:
        if replica := self.known.get(replica_id):
            await asyncio.to_thread(ray.kill, actor_of(replica))  # waits until the process ends
