"""Which replicas of a model run, and how a router reaches them.

Ray Serve is one source (serve_source.py), and a process that runs its replicas itself another one.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from kvroute.wire.address import Address


class NoReplicaError(Exception):
    """A replica, or what runs the replicas, cannot be called. The message says why."""


@dataclass(frozen=True, slots=True)
class Deployed:
    """A model's replicas, as whatever runs them lists them."""

    wanted: int  # number of replicas that there should be
    states: Mapping[str, str]  # replica id -> its state, such as "STARTING" or "RUNNING"
    ended: frozenset[str]  # ids of replicas that have ended lately


class ReplicaSource(Protocol):
    """The replicas of one model."""

    def ids(self) -> Collection[str]:
        """Return the ids of the replicas that can get requests now."""
        ...

    def hold(self, replica_id: str) -> object:
        """Return an object that keeps the replica reachable for the methods below.

        The replica stays reachable for as long as the caller keeps a reference to the object.
        """
        ...

    async def address(self, replica_id: str) -> Address:
        """Ask the replica for its address.

        Raises:
            NoReplicaError: the replica cannot be called.
            DECODE_ERRORS: the answer cannot be read.
        """
        ...

    async def probe(self, replica_id: str) -> None:
        """Wait until the replica's process answers.

        Raises:
            NoReplicaError: the process cannot be reached.
        """
        ...

    async def kill(self, replica_id: str) -> None:
        """End the replica at once, even if it hangs; another one is started in its place."""
        ...

    def deployed(self) -> Deployed:
        """Return all replicas. This may take a while, so call it in a thread.

        Raises:
            NoReplicaError: nobody knows them at the moment.
        """
        ...
