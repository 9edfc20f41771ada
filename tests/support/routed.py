"""An engine, and a router's mirror that receives the engine's events."""

import random

from kvroute.contract.records import ReplicaRecord
from kvroute.replica.block_table import Changes
from kvroute.router.placement.fleet import Fleet
from tests.support.engines import BLOCK, Running

REPLICA = "a"


class Routed:
    """A router's fleet with one replica."""

    def __init__(self, running: Running) -> None:
        self.running = running
        engine = running.engine
        self.fleet = Fleet(model="m", revision="", block_size=BLOCK, rng=random.Random(0))
        self.fleet.mirror.join(REPLICA)
        self.fleet.update([ReplicaRecord(REPLICA, "1", 0, engine.facts, engine.load())])

    async def receive(self) -> None:
        """Apply all events so far to the mirror."""
        assert (await self.running.compare()).drift == 0
        changes, self.running.changes = self.running.changes, Changes()
        mirror = self.fleet.mirror
        if changes.cleared:
            mirror.join(REPLICA)
        mirror.remove(REPLICA, changes.removed)
        mirror.add(REPLICA, changes.added)
