"""What the ingress and Serve's request router, in one process, tell each other about a request.

A module of its own because Serve ships the request router's module by value: state kept there
would exist twice.
"""

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from weakref import WeakValueDictionary


@dataclass(slots=True, weakref_slot=True)
class Route:
    """Where a request should go, best first; and where it went."""

    ranking: Sequence[str]  # replica ids
    lost: Collection[str] = ()  # died under this request, whether or not Serve knows it yet
    refused: set[str] = field(default_factory=set)  # full, or dead, when they were asked
    chosen: str | None = None
    handle: object = None  # Serve's, of the chosen one: it can be asked while this is kept
    pauses: int = 0

    def next(self, running: Collection[str]) -> str | None:
        """The best replica not yet asked; None when all of them refused."""
        for replica_id in self.ranking:
            if replica_id in running and replica_id not in self.refused:
                return replica_id
        unranked = set(running).difference(self.ranking, self.refused, self.lost)
        return random.choice(list(unranked)) if unranked else None


ROUTES: WeakValueDictionary[str, Route] = WeakValueDictionary()  # by request id


class Replicas(Protocol):
    """What Serve's request router knows of them, and can do to them."""

    def ids(self) -> Collection[str]:
        """The replicas that Serve would send a request to now."""
        ...

    async def ask(self, replica_id: str) -> None:
        """Returns when the process of a replica that runs, or is on somebody's Route, has answered.
        RayError when it cannot be reached."""
        ...

    async def kill(self, replica_id: str) -> None:
        """Ends it at once, even when it hangs; Serve starts another in its place."""
        ...


class _NoReplicas:
    """Until Serve's request router has reported itself."""

    def ids(self) -> Collection[str]:
        return ()

    async def ask(self, replica_id: str) -> None: ...

    async def kill(self, replica_id: str) -> None: ...


_replicas: dict[str, Replicas] = {}  # by their deployment


def report(deployment: str, replicas: Replicas) -> None:
    """Serve's request router of that deployment is there."""
    _replicas[deployment] = replicas


def replicas(deployment: str) -> Replicas:
    return _replicas.get(deployment) or _NoReplicas()


def running_replicas(deployment: str) -> list[str]:
    """Ids of its replicas that Serve would send a request to now."""
    return list(replicas(deployment).ids())
