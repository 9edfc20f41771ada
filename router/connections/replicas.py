"""Access to the replicas that Ray Serve runs, for the rest of this process.

This is a separate module because Serve sends a pickled copy of the request router's module to each
process. State in that module would exist twice.
"""

from collections.abc import Collection
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


class _NoReplicas:
    """An empty set of replicas, in use until Serve's request router has registered itself."""

    def ids(self) -> Collection[str]:
        return ()

    def hold(self, replica_id: str) -> object:
        return None

    async def address(self, replica_id: str) -> Address:
        raise UnknownReplicaError(replica_id)

    async def probe(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None: ...


_replicas: dict[str, ServeReplicas] = {}  # deployment -> its replicas


def register(deployment: str, replicas: ServeReplicas) -> None:
    """Register Serve's request router of that deployment."""
    _replicas[deployment] = replicas


def replicas(deployment: str) -> ServeReplicas:
    return _replicas.get(deployment) or _NoReplicas()


def running_replicas(deployment: str) -> list[str]:
    """Return the ids of the deployment's replicas that can get requests now."""
    return list(replicas(deployment).ids())
