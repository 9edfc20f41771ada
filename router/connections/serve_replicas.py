"""Access to the replicas that Ray Serve runs, for the rest of this process.

This is a separate module because Serve sends a pickled copy of the request router's module to each
process. State in that module would exist twice.
"""

from collections.abc import Collection, Sequence
from typing import Protocol

from kvroute.wire.address import Address


class ServeReplicas(Protocol):
    """The replicas of one deployment that Ray Serve runs."""

    def ids(self) -> Collection[str]:
        """Return the ids of the replicas that can get requests now, according to Serve."""
        ...

    def hold(self, replica_id: str) -> object:
        """Return an object that keeps the replica reachable for the methods below.

        The replica stays reachable for as long as the caller keeps a reference to the object.
        """
        ...

    async def address(self, replica_id: str) -> Address:
        """Ask the replica for its address.

        Raises:
            RayError, UnknownReplicaError: the replica cannot be called.
            DECODE_ERRORS: the answer cannot be read.
        """
        ...

    async def probe(self, replica_id: str) -> None:
        """Wait until the replica's process answers.

        Raises:
            RayError: the process cannot be reached.
        """
        ...

    async def kill(self, replica_id: str) -> None:
        """Kill the replica at once, even if it hangs; Serve starts another one in its place."""
        ...


class UnknownReplicaError(Exception):
    """Ray Serve does not run this replica."""


class _Union:
    """The replicas of several deployments, or of none that Serve has announced yet."""

    def __init__(self, sets: Sequence[ServeReplicas]) -> None:
        self._sets = sets

    def ids(self) -> Collection[str]:
        return [replica_id for replicas in self._sets for replica_id in replicas.ids()]

    def hold(self, replica_id: str) -> object:
        held = (replicas.hold(replica_id) for replicas in self._sets)
        return next((handle for handle in held if handle is not None), None)

    async def address(self, replica_id: str) -> Address:
        if replicas := self._set_with(replica_id):
            return await replicas.address(replica_id)
        raise UnknownReplicaError(replica_id)

    async def probe(self, replica_id: str) -> None:
        if replicas := self._set_with(replica_id):
            await replicas.probe(replica_id)

    async def kill(self, replica_id: str) -> None:
        if replicas := self._set_with(replica_id):
            await replicas.kill(replica_id)

    def _set_with(self, replica_id: str) -> ServeReplicas | None:
        holders = (replicas for replicas in self._sets if replicas.hold(replica_id) is not None)
        return next(holders, None)


_replicas: dict[str, ServeReplicas] = {}  # deployment -> its replicas


def register(deployment: str, replicas: ServeReplicas) -> None:
    """Register Serve's request router of that deployment."""
    _replicas[deployment] = replicas


def replicas(deployments: Sequence[str]) -> ServeReplicas:
    """Return the replicas of all these deployments."""
    sets = [_replicas[deployment] for deployment in deployments if deployment in _replicas]
    return sets[0] if len(sets) == 1 else _Union(sets)


def running_replicas(deployments: Sequence[str]) -> list[str]:
    """Return the ids of the deployments' replicas that can get requests now."""
    return list(replicas(deployments).ids())
