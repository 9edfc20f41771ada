"""Detects hung replicas and kills them, so that their requests fail over and they are replaced.

A replica that sends no messages is only suspect, and gets no new requests. It is declared dead if
it does not answer probes either. In the replica, a separate thread answers probes, so that a busy
replica answers them too. If a connection ends, no probe is needed: the requests on it fail over at
once.
"""

import asyncio
import logging
from collections.abc import Callable

from kvroute.contract.ranks import replica_of
from kvroute.router.connections.links import HungError, Links
from kvroute.router.connections.replica_source import NoReplicaError, ReplicaSource
from kvroute.router.placement.fleet import Fleet

log = logging.getLogger("kvroute.liveness")

CHECK_INTERVAL_S = 0.25  # seconds between two checks of all replicas
PROBE_CHECKS = 6  # number of checks without a sign of life after which a replica is probed
# Number of checks without a sign of life after which a replica gets no new requests.
SUSPECT_CHECKS = 8


class Liveness:
    """One router's view of which replicas are alive.

    Time is counted in checks, not in seconds. So if the router itself was stopped for a while, no
    replica looks silent when the router continues.
    """

    def __init__(
        self,
        replicas: Callable[[], ReplicaSource],
        links: Links,
        fleet: Fleet,
        *,
        hang_timeout_s: float,
    ) -> None:
        self._replicas = replicas
        self._links = links
        self._fleet = fleet
        self._dead_checks = max(SUSPECT_CHECKS, round(hang_timeout_s / CHECK_INTERVAL_S))
        self._quiet: dict[str, int] = {}  # replica id -> checks without a sign of life
        self._received: dict[str, int] = {}  # replica id -> messages received until the last check
        self._probed: set[str] = set()  # ids of replicas that have not answered a probe yet

    def running(self) -> list[str]:
        """Return the ranks that can get requests now."""
        return self._links.connected()

    def trusted(self) -> list[str]:
        """Return the ranks whose replicas are not suspected to hang."""
        suspect = {id_ for id_, quiet in self._quiet.items() if quiet >= SUSPECT_CHECKS}
        running = self.running()
        return [id_ for id_ in running if replica_of(id_) not in suspect] if suspect else running

    async def run(self) -> None:
        """Check all replicas at each interval, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                await asyncio.sleep(CHECK_INTERVAL_S)
                self.check(tasks)

    def check(self, tasks: asyncio.TaskGroup) -> None:
        """Probe silent replicas, and kill those that have been silent for the hang timeout."""
        replicas = self._replicas()
        watched = self._links.busy().union(replicas.ids())
        for replica_id in self._quiet.keys() - watched:
            del self._quiet[replica_id]
            self._received.pop(replica_id, None)
        for replica_id in watched:
            quiet = self._quiet[replica_id] = self._quiet_checks(replica_id)
            if quiet and quiet % self._dead_checks == 0:  # again after each further hang timeout
                log.warning("replica %s does not respond; killing it", replica_id)
                # End the requests now, since Ray needs seconds to kill a hung process.
                self._links.lose(replica_id, HungError(f"replica {replica_id} does not answer"))
                tasks.create_task(replicas.kill(replica_id))
            elif quiet >= PROBE_CHECKS and replica_id not in self._probed:
                self._probed.add(replica_id)
                tasks.create_task(self._probe(replica_id))

    def _quiet_checks(self, replica_id: str) -> int:
        """Return the number of checks in a row, up to this one, without a sign of life."""
        quiet, received = self._quiet.get(replica_id, 0), self._links.received_messages(replica_id)
        has_sent = received != self._received.get(replica_id, received)
        self._received[replica_id] = received
        # An idle replica counts as alive. But a replica that was declared dead does not: it is idle
        # only because its requests were ended.
        is_alive = has_sent or (quiet < self._dead_checks and self._is_idle(replica_id))
        return 0 if is_alive else quiet + 1

    def _is_idle(self, replica_id: str) -> bool:
        if self._links.pending_calls(replica_id):
            return False
        ranks = self._links.reported_ranks(replica_id) or self._fleet.replicas.ranks_of(replica_id)
        return bool(ranks) and all(map(self._fleet.loads.is_idle, ranks))

    async def _probe(self, replica_id: str) -> None:
        try:
            await self._replicas().probe(replica_id)
            self._quiet[replica_id] = 0
        except NoReplicaError:
            return  # the process cannot be reached, which is no sign of life
        finally:
            self._probed.remove(replica_id)
