"""The mirror follows the index: a task of its own, never on a request's way."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

from redis.exceptions import RedisError

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import Change, FencedError, Index, Position, ReplicaRecord
from router.fleet import Fleet

log = logging.getLogger("kvroute.feed")

POLL_S = 1.0  # how often the replicas' records are read: loads, ends of leases, missed changes
WAIT_MS = 200  # the longest wait for a change
STEP_S = 0.001  # of work on the mirror after which requests have the event loop
STEP_BLOCKS = 1000  # in one piece of it: half a millisecond, a few when the mirror's tables grow
RETRY_S = 0.5  # between attempts while Redis is away


class Feed:
    """Keeps one fleet's mirror equal to the index; while Redis is away it stays as it is."""

    def __init__(self, index: Index, fleet: Fleet) -> None:
        self._index = index
        self._fleet = fleet
        self._mirror = fleet.mirror
        self._position = Position("0-0")
        self._seen: dict[str, tuple[str, int]] = {}  # replica id -> incarnation, changes applied
        self._polled: dict[str, int] = {}  # replica id -> seq in its record at the last poll
        self._step_began_s = 0.0

    async def run(self) -> None:
        """Follows the index until cancelled."""
        while True:
            try:
                self._position = await self._index.position()
                await self._poll()
                await self._follow()
            except (RedisError, OSError) as error:
                log.warning("Redis is away (%s); the mirror stays as it is", error)
                await asyncio.sleep(RETRY_S)

    async def _follow(self) -> None:
        due = time.monotonic() + POLL_S
        while True:
            for position, change in await self._index.follow(self._position, block_ms=WAIT_MS):
                await self._apply(change)
                self._position = position
                await self._give_way()
            if time.monotonic() >= due:
                await self._poll()
                due = time.monotonic() + POLL_S
            while self._mirror.sweep():
                await self._give_way()

    async def _apply(self, change: Change) -> None:
        replica_id, last = change.replica_id, (change.incarnation, change.seq)
        incarnation, seq = self._seen.get(replica_id, ("", 0))
        if change.joined:
            self._mirror.join(replica_id)
        elif incarnation == change.incarnation and change.seq <= seq:
            return  # part of the snapshot that was loaded
        elif (incarnation, seq + 1) != last:
            await self._reload(replica_id)
            return
        else:
            await self._take(change)
        self._seen[replica_id] = last

    async def _take(self, change: Change) -> None:
        if change.cleared:
            self._mirror.join(change.replica_id)
        await self._in_steps(self._mirror.remove, change.replica_id, change.removed)
        await self._in_steps(self._mirror.add, change.replica_id, change.added)

    async def _poll(self) -> None:
        """Reads who lives and how busy they are; whoever is not what we think is loaded again."""
        records = {record.id: record for record in await self._index.records()}
        self._fleet.update(records.values())
        for replica_id in self._mirror.replica_ids - records.keys():
            self._forget(replica_id)
        for record in records.values():
            if self._is_behind(record):
                await self._reload(record.id)
        self._polled = {replica_id: record.seq for replica_id, record in records.items()}

    def _is_behind(self, record: ReplicaRecord) -> bool:
        """True when changes were missed: the stream had a whole poll's time to bring them."""
        incarnation, seq = self._seen.get(record.id, ("", 0))
        if incarnation != record.incarnation or record.seq < seq:
            return True
        return seq < self._polled.get(record.id, 0)

    async def _reload(self, replica_id: str) -> None:
        record = await self._index.record(replica_id)
        if record is None:
            self._forget(replica_id)
            return
        try:
            seq, blocks = await self._index.blocks(record)
        except FencedError:
            self._forget(replica_id)  # replaced this moment: its joining is in the stream
            return
        self._mirror.join(replica_id)
        await self._in_steps(self._mirror.add, replica_id, blocks)
        self._seen[replica_id] = (record.incarnation, seq)

    def _forget(self, replica_id: str) -> None:
        self._mirror.drop(replica_id)
        self._seen.pop(replica_id, None)

    async def _in_steps(
        self,
        act: Callable[[str, Sequence[Fingerprint]], None],
        replica_id: str,
        blocks: Sequence[Fingerprint],
    ) -> None:
        for begin in range(0, len(blocks), STEP_BLOCKS):
            act(replica_id, blocks[begin : begin + STEP_BLOCKS])
            await self._give_way()

    async def _give_way(self) -> None:
        """Lets requests have the event loop once this work had it for a while."""
        if time.monotonic() - self._step_began_s >= STEP_S:
            await asyncio.sleep(0)
            self._step_began_s = time.monotonic()
