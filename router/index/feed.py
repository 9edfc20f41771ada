"""Updates the mirror, which is this router's copy of the index in Redis.

This happens in a task that never delays a request. Replicas publish changes of their blocks in a
Redis stream, and the feed reads them within milliseconds. It may miss a change, if the stream
dropped it or if changes arrive faster than the feed reads them. The feed also polls: every POLL_S,
it reads the records of all replicas. So it notices a missed change at the replica's next change, or
within two polls. Then it reads all blocks of the replica again.

A replica that deregisters is removed at once. If a replica's record vanishes from Redis without
this, the replica is kept for LINGER_S: if Redis lost the record, the replica registers again within
this time.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import ReplicaRecord
from kvroute.router.index.mirror import Mirror
from kvroute.store.connection import REDIS_ERRORS, Outage
from kvroute.store.index import READ_CHANGES, FencedError, Index
from kvroute.store.index_values import END, START, BlockSet, Change, Position

log = logging.getLogger("kvroute.feed")

# Seconds between two reads of all records, which show the load of each replica, expired leases, and
# changes that the feed missed.
POLL_S = 1.0
WAIT_MS = 200  # longest wait for a change in one read of the stream, in milliseconds
STEP_S = 0.001  # seconds of work on the mirror after which the feed lets requests run
STEP_BLOCKS = 1000  # blocks per step: takes 0.5 ms, or a few ms when the mirror's tables grow
RETRY_S = 0.5  # seconds between two attempts to reach Redis
# Seconds that a replica is kept after its record vanished. If the replica has ended, it gets no
# requests meanwhile, because Ray Serve reports which replicas run.
LINGER_S = 3.0


@dataclass(frozen=True, slots=True)
class Seen:
    """The latest change of one replica that the mirror includes."""

    incarnation: str  # a new random text at each registration of the replica
    seq: int  # number of this change, counted since the registration
    # Position of this change in the stream. The replica's changes before this position are in the
    # mirror too, or belong to an earlier incarnation.
    position: Position


NOTHING_SEEN = Seen("", 0, START)  # for replicas that are not in the mirror


@dataclass(frozen=True, slots=True)
class FeedState:
    """How well the mirror follows the index."""

    is_reachable: bool  # Redis answered the last request
    age_s: float  # seconds since the mirror was last equal to the index
    loads: int  # times that all blocks of a replica were read, since the start
    changes: int  # changes read from the stream since the start
    blocks: int  # blocks in the mirror


class IndexedFleet(Protocol):
    """The part of a fleet that the feed writes."""

    @property
    def mirror(self) -> Mirror: ...

    def update(
        self,
        records: Iterable[ReplicaRecord],
        *,
        unleased: Iterable[str],
        unreadable: Mapping[str, str],
    ) -> None: ...


class Feed:
    """Keeps the mirror of one model's fleet equal to the index, except while Redis is away."""

    def __init__(self, index: Index, fleet: IndexedFleet) -> None:
        self._index = index
        self._fleet = fleet
        self._mirror = fleet.mirror
        # All changes up to this position of the stream are in the mirror. If Redis was restored
        # from a snapshot, the stream ends earlier, and a poll moves the position back to its end.
        self.position = END
        self._seen: dict[str, Seen] = {}  # replica id -> its last change in the mirror
        self._polled: dict[str, int] = {}  # replica id -> seq in its record at the last poll
        self._records: dict[str, ReplicaRecord] = {}  # replica id -> its last record
        self._vanished_s: dict[str, float] = {}  # replica id -> when its record was first missing
        self._unreadable: Mapping[str, str] = {}  # replica id -> why its record cannot be read
        self._poll_due_s = 0.0  # time of the next poll, on the monotonic clock as all times here
        self._step_began_s = 0.0  # time when the feed last let requests use the event loop
        self._equal_s = time.monotonic()  # time when the mirror was last equal to the index
        self._outage = Outage(log, "the mirror follows this router's own requests")
        self._has_loaded = asyncio.Event()  # the first poll has ended
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
        """Follow the index until cancelled."""
        while True:
            try:
                await self._poll()
                self._has_loaded.set()
                await self._follow()
            except REDIS_ERRORS as error:
                self._outage.begin(error)
                self._mirror.is_fed = False
                self._vanished_s.clear()  # records may have vanished because of the outage only
                await self._sweep()
                await asyncio.sleep(RETRY_S)

    def incarnation(self, replica_id: str) -> str | None:
        """Return the replica's incarnation in the mirror, or None if the replica is not there."""
        seen = self._seen.get(replica_id)
        return seen.incarnation if seen else None

    def request_reload(self, replica_id: str) -> None:
        """Make the next poll read all blocks of the replica again."""
        self._seen.pop(replica_id, None)

    async def wait_until_loaded(self, *, timeout_s: float) -> None:
        """Wait until the first poll has loaded every replica, or until the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._has_loaded.wait()

    async def _follow(self) -> None:
        """Apply changes from the stream until cancelled. Poll when a poll is due."""
        while True:
            changes, applied = await self._index.follow(self.position, block_ms=WAIT_MS), 0
            read_s = time.monotonic()
            for position, change in changes:
                if change is not None:
                    await self._apply(position, change)
                self.position = position
                applied += 1
                await self._yield_to_requests()
                await self._poll_if_due()
            self._changes += applied
            if applied < READ_CHANGES:  # the stream had no more changes
                self._equal_s = read_s
            await self._poll_if_due()
            await self._sweep()

    async def _apply(self, position: Position, change: Change) -> None:
        replica_id, seen = change.replica_id, self._seen.get(change.replica_id, NOTHING_SEEN)
        if position <= seen.position:
            return
        if change.left:
            self._forget(replica_id)
            self._update_fleet()
            return
        if change.joined:
            self._mirror.join(replica_id)
        elif (change.incarnation, change.seq) == (seen.incarnation, seen.seq + 1):
            await self._apply_blocks(change)
        else:
            if replica_id in self._seen:  # a new replica is loaded by the next poll
                await self._reload(replica_id)
            return
        self._seen[replica_id] = Seen(change.incarnation, change.seq, position)

    async def _apply_blocks(self, change: Change) -> None:
        if change.cleared:
            self._mirror.join(change.replica_id)
        await self._in_steps(self._mirror.remove, change.replica_id, change.removed)
        await self._in_steps(self._mirror.add, change.replica_id, change.added)

    async def _poll_if_due(self) -> None:
        if time.monotonic() >= self._poll_due_s:
            await self._poll()

    async def _poll(self) -> None:
        """Read all records, and reload the replicas whose changes the mirror has missed.

        If Redis refuses writes, it counts as unreachable: replicas cannot renew their leases, so
        the records of running replicas vanish.
        """
        await self._index.check_writes()
        await self._rewind()
        self._end_outage()
        readable, self._unreadable = await self._index.all_records()
        records = {record.id: record for record in readable}
        self._update(records)
        await self._load(filter(self._is_behind, records.values()))
        self._polled = {replica_id: record.seq for replica_id, record in records.items()}
        self._poll_due_s = time.monotonic() + POLL_S

    def _end_outage(self) -> None:
        """End the outage, and make this poll reload the replicas whose blocks were inferred."""
        self._outage.end()
        self._mirror.is_fed = True
        for replica_id in self._mirror.inferred:
            self._seen.pop(replica_id, None)

    async def _rewind(self) -> None:
        """Move back to the end of the stream, if Redis was restored from an older snapshot."""
        end = await self._index.position()
        if end < self.position:
            self.position = end
            self._seen.clear()

    def _update(self, records: Mapping[str, ReplicaRecord]) -> None:
        """Replace the records. A replica without a record keeps its last one for LINGER_S."""
        now_s = time.monotonic()
        vanished = (self._mirror.replica_ids | self._records.keys()) - records.keys()
        self._vanished_s = {id_: self._vanished_s.get(id_, now_s) for id_ in vanished}
        for replica_id in vanished:
            if now_s - self._vanished_s[replica_id] >= LINGER_S:
                self._forget(replica_id)
        self._records.update(records)
        self._update_fleet()

    def _update_fleet(self) -> None:
        self._fleet.update(
            self._records.values(), unleased=self._vanished_s, unreadable=self._unreadable
        )

    def _is_behind(self, record: ReplicaRecord) -> bool:
        """Return whether the mirror has missed changes of the replica.

        It has missed a change if the record already included this change at the previous poll.
        """
        seen = self._seen.get(record.id, NOTHING_SEEN)
        if seen.incarnation != record.incarnation or record.seq < seen.seq:
            return True
        return seen.seq < self._polled.get(record.id, 0)

    async def _reload(self, replica_id: str) -> None:
        if record := await self._index.record(replica_id):
            await self._load([record])

    async def _load(self, records: Iterable[ReplicaRecord]) -> None:
        """Load these replicas. While the mirror stores one replica's blocks, read the next ones."""
        unread = iter(records)

        async def read() -> tuple[ReplicaRecord, BlockSet] | None:
            for record in unread:
                # FencedError: it has registered again. The stream will have this change.
                with contextlib.suppress(FencedError):
                    return record, await self._index.blocks(record)
            return None

        reading = asyncio.create_task(read())
        try:
            while loaded := await reading:
                reading = asyncio.create_task(read())
                await self._load_snapshot(*loaded)
        finally:
            reading.cancel()

    async def _load_snapshot(self, record: ReplicaRecord, snapshot: BlockSet) -> None:
        for _ in self._mirror.load(record.id, snapshot.packed):
            await self._yield_to_requests()
        self._seen[record.id] = Seen(record.incarnation, snapshot.seq, snapshot.position)
        self._loads += 1

    def _forget(self, replica_id: str) -> None:
        self._mirror.drop(replica_id)
        for by_id in (self._seen, self._records, self._vanished_s):
            by_id.pop(replica_id, None)

    async def _in_steps(
        self,
        change: Callable[[str, Sequence[Fingerprint]], None],
        replica_id: str,
        blocks: Sequence[Fingerprint],
    ) -> None:
        for begin in range(0, len(blocks), STEP_BLOCKS):
            change(replica_id, blocks[begin : begin + STEP_BLOCKS])
            await self._yield_to_requests()

    async def _sweep(self) -> None:
        while self._mirror.sweep():
            await self._yield_to_requests()

    async def _yield_to_requests(self) -> None:
        """Let requests use the event loop if the feed has used it for STEP_S."""
        if time.monotonic() - self._step_began_s >= STEP_S:
            await asyncio.sleep(0)
            self._step_began_s = time.monotonic()
