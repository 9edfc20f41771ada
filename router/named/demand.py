"""A prefix that its replicas cannot serve any more is kept warm on one more, for as long as needed.

Each router looks once a second at the replicas that keep a prefix warm and proposes; Redis holds
the number. Whoever sees it change starts to watch anew, so several routers raise it once.
"""

import asyncio
import contextlib
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.exceptions import RedisError

from replica.kvindex.prefixes import Prefix
from router.named.prefixes import Catalogue, keepers
from router.routing.fleet import Fleet

log = logging.getLogger("kvroute.demand")

SECOND_S = 1.0
RAISE_SECONDS = 10  # looked back at before another replica is added
RAISE_CROWDED = 8  # of them in which there was no room
LOWER_SECONDS = 60  # looked back at before one is taken away
LOWER_BUSY = 0.5  # the most that the others would then be busy


@dataclass(frozen=True, slots=True)
class Second:
    """The replicas that keep a prefix warm, at one moment, and its requests since the last one."""

    requests: int
    backlog_s: float  # the least of theirs: seconds of prefill queued or running
    busy: float  # share of them with any

    def is_crowded(self, prefix_s: float) -> bool:
        """Waiting where it is warm takes longer than computing it elsewhere would."""
        return self.requests > 0 and self.backlog_s >= prefix_s


def extra_replicas(
    extra: int, seconds: Sequence[Second], *, prefix_s: float, warm: int, others: int
) -> int:
    """How many should keep the prefix warm besides those asked for: one more, one less, or as now.

    seconds: oldest first, since `extra` changed. prefix_s: to compute it. warm: replicas that keep
    it; others: that do not.
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
    """One prefix since the number of its replicas changed."""

    extra: int
    seconds: deque[Second] = field(default_factory=lambda: deque(maxlen=LOWER_SECONDS))


class Demand:
    """Watches the prefixes that only some replicas keep warm."""

    def __init__(
        self, catalogue: Catalogue, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._catalogue = catalogue
        self._fleet = fleet
        self._clock = clock
        self._requests: Counter[str] = Counter()  # prefix name -> prompts since the last look
        self._watched: dict[str, _Watched] = {}  # by prefix name

    def count(self, prefix: Prefix) -> None:
        """A prompt with this prefix began."""
        self._requests[prefix.name] += 1

    async def run(self) -> None:
        """Looks and proposes until cancelled."""
        while True:
            await asyncio.sleep(SECOND_S)
            for prefix, extra in self.look():
                log.info("prefix %s: %d replicas besides for its demand", prefix.name, extra)
                with contextlib.suppress(RedisError, OSError):  # the next second proposes it again
                    await self._catalogue.store.set_extra(prefix.id, prefix.version, extra)

    def look(self) -> list[tuple[Prefix, int]]:
        """Takes one more second into account; what should change by it."""
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
        warm = [record.id for record in keepers(prefix, self._fleet.records)]
        if not warm:
            return prefix.extra_replicas
        backlogs = self._fleet.backlogs_s(warm, self._clock())
        busy = sum(backlog_s > 0 for backlog_s in backlogs) / len(backlogs)
        seen.seconds.append(Second(requests, min(backlogs), busy))
        return extra_replicas(
            prefix.extra_replicas,
            list(seen.seconds),
            prefix_s=self._fleet.prefill_s(warm[0], len(prefix.token_ids)),
            warm=len(warm),
            others=len(self._fleet.records) - len(warm),
        )
