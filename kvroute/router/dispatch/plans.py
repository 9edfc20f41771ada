"""State that the ingress and Serve's request router share about each request, in one process.

This is a separate module because Serve ships the request router's module by value: state kept there
would exist twice.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary


@dataclass(slots=True, weakref_slot=True)
class DispatchPlan:
    """Where a request should go, best first; and where it went."""

    ranking: Sequence[str]  # replica ids
    lost: Collection[str] = ()  # died during this request, whether or not Serve knows it yet
    refused: set[str] = field(default_factory=set)  # were full, or dead, when tried
    chosen: str | None = None
    handle: object = None  # Serve's, of the chosen replica; keeps the replica reachable
    pauses: int = 0

    def next(self, running: Collection[str]) -> str | None:
        """The best replica that has not refused; None when all have."""
        for replica_id in self.ranking:
            if replica_id in running and replica_id not in self.refused:
                return replica_id
        unranked = set(running).difference(self.ranking, self.refused, self.lost)
        return random.choice(list(unranked)) if unranked else None


PLANS: WeakValueDictionary[str, DispatchPlan] = WeakValueDictionary()  # by request id


class Replicas(Protocol):
    """What Serve's request router knows about the replicas, and can do with them."""

    def ids(self) -> Collection[str]:
        """The replicas that Serve would send a request to now."""
        ...

    async def probe(self, replica_id: str) -> None:
        """Returns when the process of a replica that runs, or is in a plan, has answered.
        RayError when it cannot be reached."""
        ...

    async def kill(self, replica_id: str) -> None:
        """Kills it at once, even when it hangs; Serve starts another one as replacement."""
        ...


class _NoReplicas:
    """Used until Serve's request router has registered."""

    def ids(self) -> Collection[str]:
        return ()

    async def probe(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None: ...


_replicas: dict[str, Replicas] = {}  # by deployment


def register(deployment: str, replicas: Replicas) -> None:
    """Registers Serve's request router of that deployment."""
    _replicas[deployment] = replicas


def replicas(deployment: str) -> Replicas:
    return _replicas.get(deployment) or _NoReplicas()


def running_replicas(deployment: str) -> list[str]:
    """Ids of the deployment's replicas that Serve would send a request to now."""
    return list(replicas(deployment).ids())
