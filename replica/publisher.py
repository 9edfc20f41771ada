"""Publishes a replica's cached blocks and its heartbeat to the index in Redis.

Every write checks the state in Redis, and there is a write at least every third of the lease. If
the state is lost or wrong, the replica registers again with all its blocks after RETRY_S. While
another process holds the replica's id, the replica waits until that process leaves or until that
process's lease expires.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
from redis.exceptions import RedisError

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.audit_report import Comparison, ReplicaAudit
from kvroute.contract.records import Description, Load, Pins
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import BlocksHeld, EventsLost, KVEvent
from kvroute.replica.engine.protocol import Engine
from kvroute.store.index import BATCH_BLOCKS, FencedError, Index
from kvroute.store.index_values import WriterState
from kvroute.store.outage import Outage

log = logging.getLogger("kvroute.publisher")

BATCH_S = 0.005  # changes are collected for this many seconds before they are written
RETRY_S = 0.5  # seconds between a failed write and the next registration


class Publisher:
    """Publishes one engine's changes and heartbeat; the engine runs on without Redis."""

    def __init__(
        self,
        index: Index,
        table: BlockTable,
        *,
        replica_id: str,
        description: Description,
        load: Callable[[], Load],
        pins: Callable[[], Pins] = dict,
        lease_s: float,
    ) -> None:
        self._index = index
        self._table = table
        self._replica_id = replica_id
        self._description = description
        self._load = load
        self._pins = pins
        self._lease_s = lease_s
        self._changes = Changes()
        self._changed = asyncio.Event()
        # The state after the last write of the latest registration, or of the latest attempt.
        self._writer_state = WriterState(replica_id, "")
        self._was_registered = False  # True once a registration has succeeded
        self._is_registered = False
        self._outage = Outage(log, f"replica {replica_id} will register again")
        self._renewal_s = 0.0  # time of the next renewal, on the event loop's clock
        self.registrations = 0
        # Monotonic time of the oldest change that is not written yet; None: all are written.
        self._waiting_since_s: float | None = None
        self._written_s = time.monotonic()  # time of the last write that Redis accepted
        # How the block table differed from the engine's blocks, for the running audit.
        self._known: Comparison | None = None
        self._audit: asyncio.Future[ReplicaAudit] | None = None
        self._one_audit = asyncio.Lock()

    @property
    def blocks(self) -> int:
        """Return the number of this replica's blocks that the index should list."""
        return len(self._table)

    @property
    def host_blocks(self) -> int:
        """Return the number of blocks in host memory, including copies of blocks in the engine."""
        return len(self._table.in_host)

    @property
    def lag_s(self) -> float:
        """Return the age of the oldest change that is not in the index, or 0 if there is none."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def lease_age_s(self) -> float:
        """Return the seconds since the last write that the index accepted."""
        return time.monotonic() - self._written_s

    def publish(self, events: list[KVEvent]) -> None:
        """Queue events for the index in the engine's order, without waiting for Redis.

        The queue is never longer than twice the number of the engine's blocks, or than one batch.
        """
        self._known = self._table.apply(events, self._changes) or self._known
        if self._changes and self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if not self._is_registered:
            self._changes = Changes()  # the next registration writes the whole table
        elif len(self._changes.removed) > max(len(self._table), BATCH_BLOCKS):
            self._changes = Changes(cleared=True, added=set(self._table.held()))
        if self._changes or self._audit:
            self._changed.set()

    def renew_soon(self) -> None:
        """Write load and pins to the record within milliseconds, without waiting for Redis."""
        self._renewal_s = 0.0
        self._changed.set()

    async def receive_events(
        self, engine: Engine, observer: Callable[[Sequence[KVEvent]], None] = lambda events: None
    ) -> None:
        """Pass the engine's events to the observer and publish them, until cancelled.

        After a loss of events, the engine lists the blocks that it holds. All other blocks are
        removed from the index. Blocks whose events were lost stay missing from the index.
        """
        async for events in engine.events():
            observer(events)
            self.publish(events)
            if EventsLost() in events:
                await self._request_held(engine)

    async def audit(self, engine: Engine) -> ReplicaAudit:
        """Compare engine, table and index as of one moment, and repair any difference.

        This works under load, too. During an outage of Redis it waits.
        """
        async with self._one_audit:
            self._known, self._audit = None, asyncio.get_running_loop().create_future()
            try:
                await self._request_held(engine)
                return await self._audit
            finally:
                self._audit = None

    async def _request_held(self, engine: Engine) -> None:
        if engine.facts.prefix_caching:
            await engine.emit_held()
        else:
            self.publish([BlocksHeld([])])

    async def run(self) -> None:
        """Register the replica, write its changes and renew its lease, until cancelled."""
        while True:
            try:
                await self._register()
                await self._follow()
            except FencedError as error:
                log.warning("replica %s registers again: %s", self._replica_id, error)
            except (RedisError, OSError) as error:
                self._outage.begin(error)
            finally:
                self._is_registered = False
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Remove the replica from the index; if Redis is away, its lease expires soon after."""
        with contextlib.suppress(RedisError, OSError):
            await self._index.leave(self._replica_id, self._writer_state.incarnation)

    async def _register(self) -> None:
        """Register with all blocks.

        The first registration replaces any holder of the id. A later one fails if a newer process
        holds the id.
        """
        if self._was_registered:
            await self._index.leave(self._replica_id, self._writer_state.incarnation)
        self._writer_state = WriterState(self._replica_id, uuid.uuid4().hex[:12])
        self._plan_renewal()
        self._writer_state = await self._index.register(
            self._replica_id,
            self._writer_state.incarnation,
            replaces=not self._was_registered,
            description=self._description,
            load=self._load(),
            pins=self._pins(),
            lease_s=self._lease_s,
        )
        self._outage.end()
        self._was_registered = True
        self.registrations += 1
        self._written_s = time.monotonic()
        self._changes = Changes(added=set(self._table.held()))
        self._is_registered = True
        self._changed.set()

    async def _follow(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._renewal_s):
                    await self._changed.wait()
                    await asyncio.sleep(BATCH_S)
            self._changed.clear()
            changes, self._changes = self._changes, Changes()
            audit = self._audit if self._known else None
            held = set(self._table.held()) if audit else set()
            began_s = time.monotonic()
            await self._write(changes)
            self._waiting_since_s = began_s if self._changes else None
            if audit:
                await self._complete(audit, held)
            await self._renew_if_due()

    async def _complete(
        self, audit: "asyncio.Future[ReplicaAudit]", held: set[Fingerprint]
    ) -> None:
        """Complete an audit. Nothing is written meanwhile, so the index should equal `held`."""
        writer_state, known = self._writer_state, self._known
        record = await self._index.record(self._replica_id)
        if known is None or record is None or record.incarnation != writer_state.incarnation:
            return  # the next renewal detects the cause
        index = Comparison.of(set((await self._index.blocks(record)).blocks), held)
        if not audit.done():
            audit.set_result(
                ReplicaAudit(
                    self._replica_id,
                    writer_state.incarnation,
                    writer_state.seq,
                    known=known,
                    index=index,
                    in_host=self._table.compared_in_host or msgspec.UNSET,
                )
            )
        if index.drift:
            raise FencedError(
                f"the set in Redis differs by {index.drift} blocks from what {writer_state} wrote"
            )

    async def _renew_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._renewal_s:
            return
        self._plan_renewal()
        await self._index.renew(
            self._writer_state, load=self._load(), pins=self._pins(), lease_s=self._lease_s
        )
        self._written_s = time.monotonic()

    def _plan_renewal(self) -> None:
        """Set the time of the next renewal.

        This is called before the write, so that `renew_soon` during the write causes another one.
        """
        self._renewal_s = asyncio.get_running_loop().time() + self._lease_s / 3

    async def _write(self, changes: Changes) -> None:
        # Removals first: if a batch is interrupted, the index has too few blocks, not too many.
        if changes.cleared:
            await self._change(cleared=True)
        for removed in _slices(changes.removed):
            await self._change(removed=removed)
        for added in _slices(changes.added):
            await self._change(added=added)

    async def _change(self, **change: Any) -> None:
        self._writer_state = await self._index.change(
            self._writer_state, lease_s=self._lease_s, **change
        )
        await self._renew_if_due()  # a long series of writes can take longer than a lease


def _slices(fingerprints: set[Fingerprint]) -> Iterator[list[Fingerprint]]:
    remaining = iter(fingerprints)
    while batch := list(islice(remaining, BATCH_BLOCKS)):
        yield batch
