"""The index receives the engine's cached blocks and the replica's heartbeat.

A write detects lost or wrong state in Redis; writes come at least every third of the lease. RETRY_S
later the replica registers again with all its blocks. While another writer has its id, it waits
until that one leaves or its lease ends.
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
from kvroute.store.index import BATCH_BLOCKS, FencedError, Index, WriterState
from kvroute.store.outage import Outage

log = logging.getLogger("kvroute.publisher")

BATCH_S = 0.005  # changes are collected this long before they are written
RETRY_S = 0.5  # before the replica registers again


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
        self._writer_state = WriterState(
            replica_id, ""
        )  # of the last registration, or attempt at one
        self._was_registered = False  # at any time
        self._is_registered = False
        self._outage = Outage(log, f"replica {replica_id} will be announced again")
        self._renewal_s = 0.0  # on the event loop's clock
        self.registrations = 0
        self._waiting_since_s: float | None = None  # on the monotonic clock; None: nothing waits
        self._written_s = time.monotonic()  # time of the last write that Redis accepted
        self._known: Comparison | None = None  # with the engine, for the running audit
        self._audit: asyncio.Future[ReplicaAudit] | None = None
        self._one_audit = asyncio.Lock()

    @property
    def blocks(self) -> int:
        """How many blocks of the replica the index should have."""
        return len(self._table)

    @property
    def host_blocks(self) -> int:
        """How many blocks the replica has in host memory, copies of others included."""
        return len(self._table.in_host)

    @property
    def lag_s(self) -> float:
        """Age of the oldest change that is not in the index; 0 when all are."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def lease_age_s(self) -> float:
        """Time since the last write that the index accepted."""
        return time.monotonic() - self._written_s

    def publish(self, events: list[KVEvent]) -> None:
        """Queues events, in the engine's order; returns at once.

        The queue is never longer than twice the engine's blocks, or one batch.
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
        """Load and pins reach the record within milliseconds; returns at once."""
        self._renewal_s = 0.0
        self._changed.set()

    async def receive_events(
        self, engine: Engine, observer: Callable[[Sequence[KVEvent]], None] = lambda events: None
    ) -> None:
        """Publishes the engine's events until cancelled, and passes them to the observer.

        After a loss of events, the engine lists the blocks that it holds. Other blocks are removed
        from the index; blocks whose events were lost stay unknown.
        """
        async for events in engine.events():
            observer(events)
            self.publish(events)
            if EventsLost() in events:
                await self._request_held(engine)

    async def audit(self, engine: Engine) -> ReplicaAudit:
        """Compares engine, table and index as of one moment, also under load, and repairs any
        difference. During an outage of Redis it waits."""
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
        """Registers the replica, writes its changes and renews its lease until cancelled."""
        while True:
            try:
                await self._register()
                await self._follow()
            except FencedError as fenced:
                log.warning("replica %s will be announced again: %s", self._replica_id, fenced)
            except (RedisError, OSError) as away:
                self._outage.begin(away)
            finally:
                self._is_registered = False
            await asyncio.sleep(RETRY_S)

    async def leave(self) -> None:
        """Removes the replica from the index; if Redis is away, its lease expires soon after."""
        with contextlib.suppress(RedisError, OSError):
            await self._index.leave(self._replica_id, self._writer_state.incarnation)

    async def _register(self) -> None:
        """The first registration replaces any holder of the id; later ones keep a newer holder."""
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
                await self._answer(audit, held)
            await self._renew_if_due()

    async def _answer(self, audit: "asyncio.Future[ReplicaAudit]", held: set[Fingerprint]) -> None:
        """Completes an audit. Nothing is written meanwhile, so the index should equal `held`."""
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
            raise FencedError(f"Redis has {index.drift} blocks other than {writer_state} announced")

    async def _renew_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._renewal_s:
            return
        self._plan_renewal()
        await self._index.renew(
            self._writer_state, load=self._load(), pins=self._pins(), lease_s=self._lease_s
        )
        self._written_s = time.monotonic()

    def _plan_renewal(self) -> None:
        """Before the write: a call of `renew_soon` during the write plans another one."""
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
