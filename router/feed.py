"""The mirror follows the index: a task of its own, never on a request's way.

Changes come within milliseconds. Those that the stream lost, or that came faster than we read, are
noticed at the replica's next change, or within two polls, and the replica is loaded again. One that
left, or whose lease ended, is forgotten at the next poll.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import END, START, Change, FencedError, Index, Position, ReplicaRecord
from router.fleet import Fleet

log = logging.getLogger("kvroute.feed")

POLL_S = 1.0  # how often the replicas' records are read: loads, ends of leases, missed changes
WAIT_MS = 200  # the longest wait for a change
STEP_S = 0.001  # of work on the mirror after which requests have the event loop
STEP_BLOCKS = 1000  # in one piece of it: half a millisecond, a few when the mirror's tables grow
RETRY_S = 0.5  # between attempts while Redis is away


@dataclass(frozen=True, slots=True)
class Seen:
    """What the mirror has of a replica."""

    incarnation: str
    seq: int  # of the last change in it
    position: Position  # in the stream: whatever stands there or before is in it, or is outdated


NOTHING = Seen("", 0, START)


class Feed:
    """Keeps one fleet's mirror equal to the index; while Redis is away it stays as it is."""

    def __init__(self, index: Index, fleet: Fleet) -> None:
        self._index = index
        self._fleet = fleet
        self._mirror = fleet.mirror
        # All changes up to here are in the mirror. A poll takes it back to where the stream ends.
        self.position = END
        self._seen: dict[str, Seen] = {}  # by replica id, as in the mirror
        self._polled: dict[str, int] = {}  # replica id -> seq in its record at the last poll
        self._poll_due_s = 0.0  # on the monotonic clock
        self._step_began_s = 0.0

    async def run(self) -> None:
        """Follows the index until cancelled."""
        while True:
            try:
                await self._poll()
                await self._follow()
            except (RedisError, OSError) as error:
                log.warning("Redis is away (%s); the mirror stays as it is", error)
                await asyncio.sleep(RETRY_S)

    def incarnation(self, replica_id: str) -> str | None:
        """Of the replica as the mirror has it; None: it has not."""
        seen = self._seen.get(replica_id)
        return seen.incarnation if seen else None

    def distrust(self, replica_id: str) -> None:
        """The next poll loads the replica again."""
        self._seen.pop(replica_id, None)

    async def _follow(self) -> None:
        while True:
            for position, change in await self._index.follow(self.position, block_ms=WAIT_MS):
                await self._apply(position, change)
                self.position = position
                await self._give_way()
                await self._poll_if_due()
            await self._poll_if_due()
            while self._mirror.sweep():
                await self._give_way()

    async def _apply(self, position: Position, change: Change) -> None:
        replica_id, seen = change.replica_id, self._seen.get(change.replica_id, NOTHING)
        if position <= seen.position:
            return
        if change.joined:
            self._mirror.join(replica_id)
        elif (change.incarnation, change.seq) == (seen.incarnation, seen.seq + 1):
            await self._take(change)
        else:
            if replica_id in self._seen:  # if not, it is gone already, or the next poll finds it
                await self._reload(replica_id)
            return
        self._seen[replica_id] = Seen(change.incarnation, change.seq, position)

    async def _take(self, change: Change) -> None:
        if change.cleared:
            self._mirror.join(change.replica_id)
        await self._in_steps(self._mirror.remove, change.replica_id, change.removed)
        await self._in_steps(self._mirror.add, change.replica_id, change.added)

    async def _poll_if_due(self) -> None:
        if time.monotonic() >= self._poll_due_s:
            await self._poll()

    async def _poll(self) -> None:
        """Reads who lives and how busy they are; whoever is not what we think is loaded again."""
        await self._rewind()
        records = {record.id: record for record in await self._index.records()}
        self._fleet.update(records.values())
        for replica_id in self._mirror.replica_ids - records.keys():
            self._forget(replica_id)
        for record in records.values():
            if self._is_behind(record):
                await self._reload(record.id)
        self._polled = {replica_id: record.seq for replica_id, record in records.items()}
        self._poll_due_s = time.monotonic() + POLL_S

    async def _rewind(self) -> None:
        """Never ahead of the stream, which a Redis restored from a snapshot can leave us."""
        end = await self._index.position()
        if end < self.position:
            self.position = end
            self._seen.clear()

    def _is_behind(self, record: ReplicaRecord) -> bool:
        """True when changes were missed: the stream had a whole poll's time to bring them."""
        seen = self._seen.get(record.id, NOTHING)
        if seen.incarnation != record.incarnation or record.seq < seen.seq:
            return True
        return seen.seq < self._polled.get(record.id, 0)

    async def _reload(self, replica_id: str) -> None:
        record = await self._index.record(replica_id)
        if record is None:
            self._forget(replica_id)
            return
        try:
            snapshot = await self._index.blocks(record)
        except FencedError:
            self._forget(replica_id)  # replaced this moment: its joining is in the stream
            return
        self._mirror.join(replica_id)
        await self._in_steps(self._mirror.add, replica_id, snapshot.blocks)
        self._seen[replica_id] = Seen(record.incarnation, snapshot.seq, snapshot.position)

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
