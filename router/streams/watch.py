"""A replica that hangs is made one that died: whoever waits for it learns so, and it is replaced.

Silence only raises a suspicion; what convicts is a question that stays unanswered, so a replica
that is busy, however slow, is left in peace.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from ray.exceptions import RayError

from router.routing.fleet import Fleet
from router.streams.routes import Replicas, Route

log = logging.getLogger("kvroute.watch")

LOOK_S = 0.25
ASKED_LOOKS = 6  # without a sign of life, then the replica is asked for one
DOUBTED_LOOKS = 8  # then nothing new is sent there

T = TypeVar("T")


class HungError(Exception):
    """The replica was given up while its answer was waited for."""


class Watch:
    """One router's suspicions. Time is counted in looks, not in seconds: a router that was itself
    stopped for a while must not blame the replicas when it wakes."""

    def __init__(
        self, replicas: Callable[[], Replicas], fleet: Fleet, *, hang_timeout_s: float
    ) -> None:
        self._replicas = replicas
        self._fleet = fleet
        self._hung_looks = max(DOUBTED_LOOKS, round(hang_timeout_s / LOOK_S))
        self._quiet: dict[str, int] = {}  # replica id -> looks without a sign of life
        self._asked: set[str] = set()
        self._waits: dict[asyncio.Timeout, Route] = {}

    async def next(self, stream: AsyncIterator[T], route: Route) -> T | None:
        """The next thing that the route's replica says, None when it has ended; or HungError."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[wait] = route
                try:
                    said = await anext(stream, None)
                finally:
                    del self._waits[wait]
        except TimeoutError as error:
            raise HungError(f"replica {route.chosen} does not answer") from error
        if route.chosen is not None:
            self._quiet[route.chosen] = 0
        return said

    def running(self) -> list[str]:
        """The replicas that Serve would send a request to now."""
        return list(self._replicas().ids())

    def trusted(self) -> list[str]:
        """The running replicas that owe no answer."""
        return [id_ for id_ in self._replicas().ids() if self._quiet.get(id_, 0) < DOUBTED_LOOKS]

    async def run(self) -> None:
        """Watches until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(LOOK_S)
                self.look(tasks)

    def look(self, tasks: asyncio.TaskGroup) -> None:
        """Asks those that have been quiet, and ends those that have been so for too long."""
        replicas = self._replicas()
        # Those that Serve has given up, or lets finish, may still owe somebody an answer.
        awaited = {route.chosen for route in self._waits.values() if route.chosen is not None}
        watched = awaited.union(replicas.ids())
        for replica_id in self._quiet.keys() - watched:
            del self._quiet[replica_id]
        for replica_id in watched:
            quiet = self._quiet.get(replica_id, 0)
            # Where nothing is under way the lease is sign enough, but for those that were given up:
            # nothing is under way there since then.
            is_well = quiet < self._hung_looks and self._fleet.is_idle(replica_id)
            quiet = self._quiet[replica_id] = 0 if is_well else quiet + 1
            if quiet and quiet % self._hung_looks == 0:
                self._give_up(replica_id)
                tasks.create_task(replicas.kill(replica_id))
            elif quiet >= ASKED_LOOKS and replica_id not in self._asked:
                self._asked.add(replica_id)
                tasks.create_task(self._ask(replica_id))

    def _give_up(self, replica_id: str) -> None:
        """Ray needs seconds to end a process that does not listen; nobody waits for that."""
        log.warning("replica %s does not answer; it is ended", replica_id)
        now_s = asyncio.get_running_loop().time()
        for wait, route in self._waits.items():
            if route.chosen == replica_id and not wait.expired():
                wait.reschedule(now_s)

    async def _ask(self, replica_id: str) -> None:
        try:
            await self._replicas().ask(replica_id)
            self._quiet[replica_id] = 0
        except RayError:
            return  # out of reach: no sign of life
        finally:
            self._asked.remove(replica_id)
