"""The mirror follows the index: a task of its own, never on a request's way.

Changes come within milliseconds. Those that the stream lost, or that came faster than we read, are
noticed at the replica's next change, or within two polls, and the replica is loaded again. One that
left is forgotten at once; one that Redis no longer knows is kept for LINGER_S, in which it
announces itself again if it is Redis that forgot.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from redis.exceptions import RedisError

from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import (
    END,
    READ_CHANGES,
    START,
    Change,
    FencedError,
    Index,
    Position,
    ReplicaRecord,
    Snapshot,
)
from replica.kvindex.outage import Outage
from router.routing.fleet import Fleet

log = logging.getLogger("kvroute.feed")

POLL_S = 1.0  # how often the replicas' records are read: loads, ends of leases, missed changes
WAIT_MS = 200  # the longest wait for a change
STEP_S = 0.001  # of work on the mirror after which requests have the event loop
STEP_BLOCKS = 1000  # in one piece of it: half a millisecond, a few when the mirror's tables grow
RETRY_S = 0.5  # between attempts while Redis is away
LINGER_S = 3.0  # that a replica is known after its record vanished; Serve says whether it runs


@dataclass(frozen=True, slots=True)
class Seen:
    """What the mirror has of a replica."""

    incarnation: str
    seq: int  # of the last change in it
    position: Position  # in the stream: whatever stands there or before is in it, or is outdated


NOTHING = Seen("", 0, START)


@dataclass(frozen=True, slots=True)
class FeedState:
    """How well the mirror follows the index."""

    is_reachable: bool  # Redis answered when it was last asked
    age_s: float  # since the mirror was last equal to the index
    loads: int  # of a replica's whole set, since the start
    changes: int  # read from the stream since the start
    blocks: int  # in the mirror


class Feed:
    """Keeps one fleet's mirror equal to the index; while Redis is away nothing feeds it."""

    def __init__(self, index: Index, fleet: Fleet) -> None:
        self._index = index
        self._fleet = fleet
        self._mirror = fleet.mirror
        # All changes up to here are in the mirror. A poll takes it back to where the stream ends.
        self.position = END
        self._seen: dict[str, Seen] = {}  # by replica id, as in the mirror
        self._polled: dict[str, int] = {}  # replica id -> seq in its record at the last poll
        self._records: dict[str, ReplicaRecord] = {}  # the last ones, by replica id
        self._vanished_s: dict[str, float] = {}  # replica id -> when its record was first missed
        self._poll_due_s = 0.0  # on the monotonic clock, as all times here
        self._step_began_s = 0.0
        self._equal_s = time.monotonic()
        self._outage = Outage(log, "the mirror goes by what this router sends")
        self._has_loaded = asyncio.Event()
        self._loads = 0
        self._changes = 0

    @property
    def state(self) -> FeedState:
        return FeedState(
            not self._outage.is_on,
            time.monotonic() - self._equal_s,
            self._loads,
            self._changes,
            len(self._mirror),
        )

    async def run(self) -> None:
        """Follows the index until cancelled."""
        while True:
            try:
                await self._poll()
                self._has_loaded.set()
                await self._follow()
            except (RedisError, OSError) as error:
                self._outage.begin(error)
                self._mirror.is_fed = False
                await self._sweep()
                await asyncio.sleep(RETRY_S)

    def incarnation(self, replica_id: str) -> str | None:
        """Of the replica as the mirror has it; None: it has not."""
        seen = self._seen.get(replica_id)
        return seen.incarnation if seen else None

    def distrust(self, replica_id: str) -> None:
        """The next poll loads the replica again."""
        self._seen.pop(replica_id, None)

    async def loaded(self, *, within_s: float) -> None:
        """Returns once every replica in the index was loaded, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._has_loaded.wait()

    async def _follow(self) -> None:
        while True:
            changes, taken = await self._index.follow(self.position, block_ms=WAIT_MS), 0
            read_s = time.monotonic()
            for position, change in changes:
                await self._apply(position, change)
                self.position = position
                taken += 1
                await self._give_way()
                await self._poll_if_due()
            self._changes += taken
            if taken < READ_CHANGES:
                self._equal_s = read_s
            await self._poll_if_due()
            await self._sweep()

    async def _apply(self, position: Position, change: Change) -> None:
        replica_id, seen = change.replica_id, self._seen.get(change.replica_id, NOTHING)
        if position <= seen.position:
            return
        if change.left:
            self._forget(replica_id)
            self._fleet.update(self._records.values(), unleased=self._vanished_s)
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
        self._end_outage()
        records = {record.id: record for record in await self._index.records()}
        self._update(records)
        await self._load(filter(self._is_behind, records.values()))
        self._polled = {replica_id: record.seq for replica_id, record in records.items()}
        self._poll_due_s = time.monotonic() + POLL_S

    def _end_outage(self) -> None:
        """What was presumed meanwhile is forgotten as soon as its replica is loaded."""
        self._outage.end()
        self._mirror.is_fed = True
        for replica_id in self._mirror.presumed:
            self._seen.pop(replica_id, None)

    async def _rewind(self) -> None:
        """Never ahead of the stream, which a Redis restored from a snapshot can leave us."""
        end = await self._index.position()
        if end < self.position:
            self.position = end
            self._seen.clear()

    def _update(self, records: Mapping[str, ReplicaRecord]) -> None:
        """The records are news; of those who have none the last one is kept, for LINGER_S."""
        now_s = time.monotonic()
        vanished = (self._mirror.replica_ids | self._records.keys()) - records.keys()
        self._vanished_s = {id_: self._vanished_s.get(id_, now_s) for id_ in vanished}
        for replica_id in vanished:
            if now_s - self._vanished_s[replica_id] >= LINGER_S:
                self._forget(replica_id)
        self._records.update(records)
        self._fleet.update(self._records.values(), unleased=self._vanished_s)

    def _is_behind(self, record: ReplicaRecord) -> bool:
        """True when changes were missed: the stream had a whole poll's time to bring them."""
        seen = self._seen.get(record.id, NOTHING)
        if seen.incarnation != record.incarnation or record.seq < seen.seq:
            return True
        return seen.seq < self._polled.get(record.id, 0)

    async def _reload(self, replica_id: str) -> None:
        if record := await self._index.record(replica_id):
            await self._load([record])

    async def _load(self, records: Iterable[ReplicaRecord]) -> None:
        """Each replica's set is read while the one before it goes into the mirror."""
        unread = iter(records)

        async def read() -> tuple[ReplicaRecord, Snapshot] | None:
            for record in unread:
                with contextlib.suppress(FencedError):  # replaced this moment: it is in the stream
                    return record, await self._index.blocks(record)
            return None

        reading = asyncio.create_task(read())
        try:
            while found := await reading:
                reading = asyncio.create_task(read())
                await self._take_whole(*found)
        finally:
            reading.cancel()

    async def _take_whole(self, record: ReplicaRecord, snapshot: Snapshot) -> None:
        for _ in self._mirror.load(record.id, snapshot.packed):
            await self._give_way()
        self._seen[record.id] = Seen(record.incarnation, snapshot.seq, snapshot.position)
        self._loads += 1

    def _forget(self, replica_id: str) -> None:
        self._mirror.drop(replica_id)
        for known in (self._seen, self._records, self._vanished_s):
            known.pop(replica_id, None)

    async def _in_steps(
        self,
        act: Callable[[str, Sequence[Fingerprint]], None],
        replica_id: str,
        blocks: Sequence[Fingerprint],
    ) -> None:
        for begin in range(0, len(blocks), STEP_BLOCKS):
            act(replica_id, blocks[begin : begin + STEP_BLOCKS])
            await self._give_way()

    async def _sweep(self) -> None:
        while self._mirror.sweep():
            await self._give_way()

    async def _give_way(self) -> None:
        """Lets requests have the event loop once this work had it for a while."""
        if time.monotonic() - self._step_began_s >= STEP_S:
            await asyncio.sleep(0)
            self._step_began_s = time.monotonic()
