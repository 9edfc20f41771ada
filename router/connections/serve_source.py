"""The replicas that Ray Serve runs, as a router reaches them.

Serve tells each process about running replicas through its request router (request_router.py),
whose module it sends to the process as a pickled copy. State in that module would exist twice, so
it is here.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from ray.serve.handle import DeploymentHandle

from kvroute.process import ray_internals
from kvroute.router.connections.replica_source import Deployed, NoReplicaError
from kvroute.wire.address import Address


class KnownSet(Protocol):
    """The running replicas of one deployment; see ReplicaSource."""

    def ids(self) -> Collection[str]: ...

    def hold(self, replica_id: str) -> object: ...

    async def address(self, replica_id: str) -> Address: ...

    async def probe(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None: ...


_sets: dict[str, KnownSet] = {}  # deployment -> its replicas


def register(deployment: str, replicas: KnownSet) -> None:
    """Register Serve's request router of that deployment."""
    _sets[deployment] = replicas


class ServeSource:
    """The replicas of several deployments. Implements replica_source.ReplicaSource.

    Serve may not have announced any of the deployments yet.

    Args:
        handles: the handle of each deployment. They make Serve tell this process the replicas.
    """

    def __init__(self, handles: Sequence[DeploymentHandle]) -> None:
        self._handles = [handle.options() for handle in handles]
        self._deployments = tuple(handle.deployment_name for handle in handles)

    def _known(self) -> list[KnownSet]:
        return [_sets[name] for name in self._deployments if name in _sets]

    def ids(self) -> Collection[str]:
        known = self._known()
        if len(known) == 1:
            return known[0].ids()
        return [replica_id for replicas in known for replica_id in replicas.ids()]

    def hold(self, replica_id: str) -> object:
        held = (replicas.hold(replica_id) for replicas in self._known())
        return next((handle for handle in held if handle is not None), None)

    async def address(self, replica_id: str) -> Address:
        if replicas := self._set_with(replica_id):
            return await replicas.address(replica_id)
        raise NoReplicaError(replica_id)

    async def probe(self, replica_id: str) -> None:
        if replicas := self._set_with(replica_id):
            await replicas.probe(replica_id)

    async def kill(self, replica_id: str) -> None:
        if replicas := self._set_with(replica_id):
            await replicas.kill(replica_id)

    def deployed(self) -> Deployed:
        try:
            details = ray_internals.deployments(serve.get_replica_context().app_name)
            return deployed([details[name] for name in self._deployments])
        except (RayError, RayServeException, ValueError, KeyError) as error:
            raise NoReplicaError(str(error)) from error  # no controller, for example

    def _set_with(self, replica_id: str) -> KnownSet | None:
        holders = (replicas for replicas in self._known() if replicas.hold(replica_id) is not None)
        return next(holders, None)


def deployed(details: Sequence[Mapping[str, Any]]) -> Deployed:
    """Return the replicas of several deployments from the details that Serve reports of each."""
    replicas = [replica for each in details for replica in each["replicas"]]
    ended = [replica for each in details for replica in each.get("recent_dead_replicas", ())]
    return Deployed(
        sum(each["target_num_replicas"] for each in details),
        {str(replica["replica_id"]): str(replica["state"].value) for replica in replicas},
        frozenset(str(replica["replica_id"]) for replica in ended),
    )
