"""The links over which replicas pull blocks from each other's host memory.

A link leads from the replica that has the blocks (the source) to the one that pulls them (the
target). This module learns how fast each link is, and counts the pulls in progress. It knows only
the pulls of this router's requests.

A replica's own figures for its pulls are the start: latency and bytes per second. The results of
pulls correct them by a factor, the slowness of the link: measured time divided by predicted time.

This module has no clock: the caller passes the time, in seconds of any monotonic clock.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from kvroute.prefill.speed import Speed
from kvroute.replica.fabric.pull import LinkSpeed

MAX_LINKS = 65_536  # links whose speed is remembered; further ones keep the replicas' own figures
FIRST_PAUSE = 2.0  # time without pulls after a first failure, in the fleet's unit of time
MAX_DOUBLINGS = 10  # each further failure in a row doubles this time, this many times at most


@dataclass(slots=True)
class LinkEnd:
    """One replica's pulls in one direction: those that leave it, or those that arrive."""

    pulls: set[str] = field(default_factory=set)  # ids of the requests whose pulls are in progress
    free_s: float = -math.inf  # predicted end of the last of these pulls
    failures: int = 0  # pulls that failed in a row
    closed_until_s: float = -math.inf  # until this time, it takes part in no pull


class Transfer(NamedTuple):
    """A pull in progress."""

    source: str
    target: str
    speed: LinkSpeed  # the target's own figures
    rivals: int  # pulls that were in progress at either end when it began


class PullLinks:
    """All links between the replicas of a model."""

    def __init__(self) -> None:
        self._speeds: dict[tuple[str, str], Speed] = {}  # (source, target) -> what was learned
        self._sources: dict[str, LinkEnd] = {}
        self._targets: dict[str, LinkEnd] = {}
        self._transfers: dict[str, Transfer] = {}  # request id -> its pull in progress

    def keep(self, replica_ids: Collection[str]) -> None:
        """Forget all replicas but these."""
        self._speeds = {
            (source, target): speed
            for (source, target), speed in self._speeds.items()
            if source in replica_ids and target in replica_ids
        }
        for ends in (self._sources, self._targets):
            for replica_id in [*ends]:
                if replica_id not in replica_ids:
                    del ends[replica_id]

    # Prices.

    def slowness(self, source: str, target: str) -> float:
        """Return measured time divided by predicted time of the link; 1 if it is unknown."""
        speed = self._speeds.get((source, target))
        return speed.slowness if speed else 1.0

    def slowest(self) -> dict[str, float]:
        """Return the largest slowness of the links to each replica, as far as it is known."""
        slowest = dict[str, float]()
        for (_, target), speed in self._speeds.items():
            slowest[target] = max(speed.slowness, slowest.get(target, 0.0))
        return slowest

    def wait_s(self, source: str, target: str, now_s: float) -> float:
        """Return the seconds until the pulls in progress at both ends should be done."""
        out, into = self._sources.get(source), self._targets.get(target)
        free_s = max(out.free_s if out else -math.inf, into.free_s if into else -math.inf)
        return max(0.0, free_s - now_s)

    def pulls_from(self, source: str) -> int:
        """Return the number of pulls in progress that read from a replica."""
        end = self._sources.get(source)
        return len(end.pulls) if end else 0

    def is_open(self, source: str, target: str, now_s: float) -> bool:
        """Return whether neither end pauses after a failure."""
        out, into = self._sources.get(source), self._targets.get(target)
        return not ((out and now_s < out.closed_until_s) or (into and now_s < into.closed_until_s))

    # Pulls.

    def begin(
        self, request_id: str, source: str, target: str, *, speed: LinkSpeed, end_s: float
    ) -> None:
        """Add a pull in progress.

        Args:
            speed: how fast the target pulls, by its own figures.
            end_s: the time at which the pull should be done.
        """
        ends = self._ends(source, target)
        rivals = max(len(end.pulls) for end in ends)
        self._transfers[request_id] = Transfer(source, target, speed, rivals)
        for end in ends:
            end.pulls.add(request_id)
            end.free_s = max(end.free_s, end_s)

    def end(self, request_id: str) -> Transfer | None:
        """Remove the pull of a request; return None if it has none in progress."""
        transfer = self._transfers.pop(request_id, None)
        if transfer is None:
            return None
        for end in self._ends(transfer.source, transfer.target):
            end.pulls.discard(request_id)
            if not end.pulls:
                end.free_s = -math.inf
        return transfer

    def learn(self, transfer: Transfer, size_bytes: float, took_s: float) -> None:
        """Learn the speed of a link from a pull that brought bytes."""
        for end in self._ends(transfer.source, transfer.target):
            end.failures = 0
        key = transfer.source, transfer.target
        if key not in self._speeds and len(self._speeds) >= MAX_LINKS:
            return
        # Pulls that were in progress before have taken a part of the bandwidth for some time.
        predicted_s = transfer.speed.seconds(size_bytes) * (1 + transfer.rivals)
        self._speeds.setdefault(key, Speed()).learn(predicted_s, took_s)

    def fail(self, transfer: Transfer, now_s: float, *, busy_s: float) -> None:
        """Let both ends pause after a failed pull, longer after each failure in a row.

        One of them has the fault. The other one's next pull works, which ends its pauses.

        Args:
            busy_s: the fleet's unit of time (placement/scale.py).
        """
        for end in self._ends(transfer.source, transfer.target):
            pause_s = FIRST_PAUSE * busy_s * 2.0 ** min(end.failures, MAX_DOUBLINGS)
            end.failures += 1
            end.closed_until_s = max(end.closed_until_s, now_s + pause_s)

    def _ends(self, source: str, target: str) -> tuple[LinkEnd, LinkEnd]:
        return self._sources.setdefault(source, LinkEnd()), self._targets.setdefault(
            target, LinkEnd()
        )
