"""A hung replica is declared dead: requests that wait for it fail over, and Serve replaces it.

Silence only makes a replica suspect. It is declared dead when it does not answer a probe either, so
a busy replica is never declared dead, however slow it is.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

from ray.exceptions import RayError

from kvroute.router.dispatch.plans import DispatchPlan, Replicas
from kvroute.router.routing.fleet import Fleet

log = logging.getLogger("kvroute.liveness")

CHECK_INTERVAL_S = 0.25
PROBE_CHECKS = 6  # checks without a sign of life; then the replica is probed
SUSPECT_CHECKS = 8  # then the replica gets no new requests

T = TypeVar("T")


class HungError(Exception):
    """The replica was declared dead while a request waited for it."""


class Liveness:
    """One router's view of which replicas are alive. Time is counted in checks, not in seconds: a
    router that was itself stopped must not blame the replicas when it continues."""

    def __init__(
        self, replicas: Callable[[], Replicas], fleet: Fleet, *, hang_timeout_s: float
    ) -> None:
        self._replicas = replicas
        self._fleet = fleet
        self._dead_checks = max(SUSPECT_CHECKS, round(hang_timeout_s / CHECK_INTERVAL_S))
        self._quiet: dict[str, int] = {}  # replica id -> checks without a sign of life
        self._probed: set[str] = set()  # ids of replicas with a probe in flight
        self._waits: dict[asyncio.Timeout, DispatchPlan] = {}

    async def next(self, stream: AsyncIterator[T], plan: DispatchPlan) -> T | None:
        """The next item from the plan's replica, None at the end of the stream. HungError when the
        replica is declared dead."""
        try:
            async with asyncio.timeout(None) as wait:
                self._waits[wait] = plan
                try:
                    item = await anext(stream, None)
                finally:
                    del self._waits[wait]
        except TimeoutError as error:
            raise HungError(f"replica {plan.chosen} does not answer") from error
        if plan.chosen is not None:
            self._quiet[plan.chosen] = 0
        return item

    def running(self) -> list[str]:
        """The replicas that Serve would send a request to now."""
        return list(self._replicas().ids())

    def trusted(self) -> list[str]:
        """The running replicas that are not suspect."""
        return [id_ for id_ in self._replicas().ids() if self._quiet.get(id_, 0) < SUSPECT_CHECKS]

    async def run(self) -> None:
        """Checks all replicas at each interval, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(CHECK_INTERVAL_S)
                self.check(tasks)

    def check(self, tasks: asyncio.TaskGroup) -> None:
        """Probes replicas that are quiet, and kills those that have been quiet for too long."""
        replicas = self._replicas()
        # Requests may also wait for replicas that Serve has dropped, or is draining.
        awaited = {plan.chosen for plan in self._waits.values() if plan.chosen is not None}
        watched = awaited.union(replicas.ids())
        for replica_id in self._quiet.keys() - watched:
            del self._quiet[replica_id]
        for replica_id in watched:
            quiet = self._quiet.get(replica_id, 0)
            # An idle replica with a valid lease is alive. This does not hold for a replica that was
            # declared dead: it is idle because its requests were ended.
            is_alive = quiet < self._dead_checks and self._fleet.is_idle(replica_id)
            quiet = self._quiet[replica_id] = 0 if is_alive else quiet + 1
            if quiet and quiet % self._dead_checks == 0:
                self._declare_dead(replica_id)
                tasks.create_task(replicas.kill(replica_id))
            elif quiet >= PROBE_CHECKS and replica_id not in self._probed:
                self._probed.add(replica_id)
                tasks.create_task(self._probe(replica_id))

    def _declare_dead(self, replica_id: str) -> None:
        """Ends the waits for the replica at once: Ray needs seconds to kill a hung process."""
        log.warning("replica %s does not respond; killing it", replica_id)
        now_s = asyncio.get_running_loop().time()
        for wait, plan in self._waits.items():
            if plan.chosen == replica_id and not wait.expired():
                wait.reschedule(now_s)

    async def _probe(self, replica_id: str) -> None:
        try:
            await self._replicas().probe(replica_id)
            self._quiet[replica_id] = 0
        except RayError:
            return  # unreachable: no sign of life
        finally:
            self._probed.remove(replica_id)
