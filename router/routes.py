"""What the ingress and Serve's request router, in one process, tell each other about a request.

A module of its own because Serve ships the request router's module by value: state kept there
would exist twice.
"""

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from weakref import WeakValueDictionary


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


ROUTES: WeakValueDictionary[str, Route] = WeakValueDictionary()  # by request id

_running: Callable[[], Collection[str]] = tuple


def report_running(running: Callable[[], Collection[str]]) -> None:
    """Serve's request router says who tells which replicas run."""
    global _running
    _running = running


def running_replicas() -> list[str]:
    """Ids of the replicas that Serve would send a request to now."""
    return list(_running())
