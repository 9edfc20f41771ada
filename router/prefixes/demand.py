"""A prefix with more requests than its replicas can serve gets extra replicas while needed.

Once a second, each router checks the replicas that keep a prefix warm and proposes a number of
extra replicas. Redis holds the number. When it changes, every router starts to observe again. So
several routers together raise it only once.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from kvroute.router.placement.fleet import Fleet
from kvroute.router.prefixes.catalogue import Catalogue, keepers
from kvroute.store.prefixes import Prefix

log = logging.getLogger("kvroute.demand")

SECOND_S = 1.0
RAISE_SECONDS = 10  # observed before a replica is added
RAISE_CROWDED = 8  # of these seconds in which the replicas were crowded
LOWER_SECONDS = 60  # observed before a replica is removed
LOWER_BUSY = 0.5  # the highest busy share of the remaining replicas after the removal


@dataclass(frozen=True, slots=True)
class Second:
    """The replicas that keep a prefix warm at one moment, and its requests since the last check."""

    requests: int
    backlog_s: float  # the smallest of the replicas': seconds of prefill queued or running
    busy: float  # share of the replicas with a backlog

    def is_crowded(self, prefix_s: float) -> bool:
        """Waiting where it is warm takes longer than computing it elsewhere would."""
        return self.requests > 0 and self.backlog_s >= prefix_s


def extra_replicas(
    extra: int, seconds: Sequence[Second], *, prefix_s: float, warm: int, others: int
) -> int:
    """How many extra replicas should keep the prefix warm: one more, one less, or as now.

    seconds: oldest first, since `extra` changed. prefix_s: time to compute the prefix. warm:
    replicas that keep it; others: replicas that do not.
    """
    latest = seconds[-RAISE_SECONDS:]
    if others and sum(second.is_crowded(prefix_s) for second in latest) >= RAISE_CROWDED:
        return extra + 1
    minute = seconds[-LOWER_SECONDS:]
    if not extra or len(minute) < LOWER_SECONDS:
        return extra
    busy = sum(second.busy for second in minute) / len(minute)
    is_unused = not any(second.requests for second in minute)
    if is_unused or busy * warm <= LOWER_BUSY * (warm - 1):
        return extra - 1
    return extra


@dataclass(slots=True)
class _Watched:
    """One prefix, observed since the number of its replicas changed."""

    extra: int
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=LOWER_SECONDS))


class Demand:
    """Observes the prefixes that only some replicas keep warm, and proposes extra replicas."""

    def __init__(
        self, catalogue: Catalogue, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._clock = clock
        self._requests: Counter[str] = Counter()  # prefix name -> prompts since the last check
        self._watched: dict[str, _Watched] = {}  # by prefix name

    def count(self, prefix: Prefix) -> None:
        """Counts a prompt with this prefix."""
        self._requests[prefix.name] += 1

    async def run(self) -> None:
        """Checks and proposes until cancelled."""
        while True:
            await asyncio.sleep(SECOND_S)
            for prefix, extra in self.check():
                log.info("prefix %s: %d extra replicas for its demand", prefix.name, extra)
                with contextlib.suppress(RedisError, OSError):  # the next second proposes it again
                    await self._catalogue.store.set_extra(prefix.id, prefix.version, extra)

    def check(self) -> list[tuple[Prefix, int]]:
        """Adds one second to the observations; returns the numbers that should change."""
        requests, self._requests = self._requests, Counter()
        watched, self._watched = self._watched, {}
        changes = []
        for prefix in self._catalogue.all():
            if prefix.replicas is None:
                continue
            seen = watched.get(prefix.name)
            if seen is None or seen.extra != prefix.extra_replicas:
                seen = _Watched(prefix.extra_replicas)
            self._watched[prefix.name] = seen
            extra = self._wanted(prefix, seen, requests[prefix.name])
            if extra != prefix.extra_replicas:
                changes.append((prefix, extra))
        return changes

    def _wanted(self, prefix: Prefix, seen: _Watched, requests: int) -> int:
        warm = [record.id for record in keepers(prefix, self._fleet.replicas.records)]
        if not warm:
            return prefix.extra_replicas
        backlogs = self._fleet.loads.backlogs_s(warm, self._clock())
        busy = sum(backlog_s > 0 for backlog_s in backlogs) / len(backlogs)
        seen.seconds.append(Second(requests, min(backlogs), busy))
        return extra_replicas(
            prefix.extra_replicas,
            list(seen.seconds),
            prefix_s=self._fleet.loads.prefill_s(warm[0], len(prefix.token_ids)),
            warm=len(warm),
            others=len(self._fleet.replicas.records) - len(warm),
        )
