"""Publishes a replica's cached blocks and its heartbeat to the index in Redis.

The replica's state in Redis expires after its lease, unless a write renews the lease. There is a
write at least once in every third of the lease. Every write checks that the state is as expected.
If it is lost or wrong, the replica waits for RETRY_S, and then registers again with all its blocks.
If another process has registered with the same replica id, this replica retries until that process
leaves or that process's lease expires. Several processes can share an engine in this way: one of
them publishes its blocks, and if it ends, another one goes on.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from itertools import islice
from typing import Any

from msgspec import structs

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.records import Description, Load
from kvroute.replica.block_table import BlockTable, Changes
from kvroute.replica.engine.kv_events import BlocksHeld, EventsLost, KVEvent, LayoutChanged
from kvroute.replica.engine.protocol import Engine
from kvroute.store.connection import REDIS_ERRORS, Outage
from kvroute.store.index import BATCH_BLOCKS, FencedError, Index
from kvroute.store.index_values import WriterState

log = logging.getLogger("kvroute.publisher")

BATCH_S = 0.005  # seconds for which changes are collected before they are written in one batch
RETRY_S = 0.5  # seconds between a failed write and the next registration

# Gets the replica's state in Redis after a write, and the fingerprints that Redis should have.
# Raises FencedError if Redis has others; the replica then registers again with all its blocks.
Check = Callable[[WriterState, set[Fingerprint]], Awaitable[None]]


class Publisher:
    """Publishes the cached blocks and the heartbeat of one engine.

    The engine also runs during an outage of Redis.
    """

    def __init__(
        self,
        index: Index,
        table: BlockTable,
        *,
        replica_id: str,
        description: Description,
        load: Callable[[], Load],
        lease_s: float,
        is_shared: bool = False,
    ) -> None:
        """Create a publisher, which writes nothing before `run`.

        Args:
            index: The index in Redis.
            table: The engine's blocks.
            replica_id: The replica's id.
            description: The replica's description.
            load: Returns the replica's load.
            lease_s: Seconds until the replica's state in Redis expires.
            is_shared: Whether a process that has registered with the same id goes on publishing.
                Otherwise the first registration replaces it.
        """
        self._index = index
        self.table = table
        self._replica_id = replica_id
        self._description = description
        self._load = load
        self._lease_s = lease_s
        self._changes = Changes()
        self._changed = asyncio.Event()
        # The replica's state in Redis after the last write. During a registration: the new state.
        self._writer_state = WriterState(replica_id, "")
        self._was_registered = False  # becomes True when the first registration succeeds
        self._is_shared = is_shared
        self._is_standby = False  # whether another process publishes the engine's blocks
        self._is_registered = False
        self._outage = Outage(log, f"replica {replica_id} will register again")
        self._renewal_s = 0.0  # time of the next renewal, on the event loop's clock
        self.registrations = 0  # number of successful registrations
        # Monotonic time of the oldest change that is not written yet. None: all are written.
        self._waiting_since_s: float | None = None
        self._written_s = time.monotonic()  # time of the last write that Redis accepted
        # Called after each batch of changes. Nothing is written meanwhile.
        self.checks: list[Check] = []

    @property
    def blocks(self) -> int:
        """Return the number of blocks that the index should list for this replica."""
        return len(self.table)

    @property
    def host_blocks(self) -> int:
        """Return the number of blocks in host memory.

        A block that is also in the engine's own memory counts, too.
        """
        return len(self.table.in_host)

    @property
    def lag_s(self) -> float:
        """Return the age of the oldest change that is not in the index, or 0 if there is none."""
        since_s = None if self._is_standby else self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def lease_age_s(self) -> float:
        """Return the seconds since the last write that the index accepted.

        It is 0 while another process publishes the engine's blocks.
        """
        return 0.0 if self._is_standby else time.monotonic() - self._written_s

    def publish(self, events: list[KVEvent]) -> None:
        """Queue the changes by these events for the index, without waiting for Redis.

        Call this in the order of the engine's events. The queue has at most twice as many
        fingerprints as the engine has blocks, or one batch if that is more.
        """
        for event in events:
            if isinstance(event, LayoutChanged):  # `run` then registers again
                self._description = structs.replace(self._description, facts=event.facts)
                self._is_registered = False
                self._changed.set()
        self.table.apply(events, self._changes)
        if self._changes and self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if not self._is_registered:
            self._changes = Changes()  # the next registration writes the whole table
        elif len(self._changes.removed) > max(len(self.table), BATCH_BLOCKS):
            self._changes = Changes(cleared=True, added=set(self.table.held()))
        if self._changes or self.checks:
            self._changed.set()

    def renew_soon(self) -> None:
        """Have the load written to Redis within milliseconds, without waiting for that."""
        self._renewal_s = 0.0
        self._changed.set()

    async def receive_events(
        self, engine: Engine, observer: Callable[[Sequence[KVEvent]], None] = lambda events: None
    ) -> None:
        """Pass the engine's events to the observer and publish them, until cancelled.

        After a loss of events, this requests a list of all cached blocks from the engine. Blocks
        that are not in the list are removed from the index. Blocks that were cached during the loss
        stay missing from the index, because the list has no fingerprints.
        """
        async for events in engine.events():
            observer(events)
            self.publish(events)
            if EventsLost() in events:
                await self.request_cached_blocks(engine)

    async def request_cached_blocks(self, engine: Engine) -> None:
        """Request a list of all cached blocks, with which the table is compared."""
        if engine.facts.prefix_caching:
            await engine.emit_held()
        else:
            self.publish([BlocksHeld([])])

    async def run(self) -> None:
        """Register the replica, write its changes and renew its lease, until cancelled."""
        while True:
            try:
                await self._register()
                await self._write_changes()
            except FencedError as error:
                level = logging.INFO if self._is_shared else logging.WARNING
                log.log(level, "replica %s registers again: %s", self._replica_id, error)
            except REDIS_ERRORS as error:
                self._outage.begin(error)
            finally:
                self._is_registered = False
            await asyncio.sleep(self._lease_s / 3 if self._is_standby else RETRY_S)

    async def leave(self) -> None:
        """Remove the replica from the index.

        If Redis does not respond, the replica's record expires with its lease.
        """
        with contextlib.suppress(*REDIS_ERRORS):
            await self._index.leave(self._replica_id, self._writer_state.incarnation)

    async def _register(self) -> None:
        """Register the replica with all its blocks.

        The first registration replaces any process with the same replica id. A later registration
        fails if a newer process has registered with this id.
        """
        if self._was_registered:
            await self._index.leave(self._replica_id, self._writer_state.incarnation)
        description = self._description
        self._writer_state = WriterState(self._replica_id, uuid.uuid4().hex[:12])
        self._plan_renewal()
        try:
            self._writer_state = await self._index.register(
                self._replica_id,
                self._writer_state.incarnation,
                replaces=not (self._was_registered or self._is_shared),
                description=description,
                load=self._load(),
                lease_s=self._lease_s,
            )
        except FencedError:
            self._is_standby = self._is_shared
            raise
        self._outage.end()
        self._is_standby = False
        self._was_registered = True
        self.registrations += 1
        self._written_s = time.monotonic()
        self._changes = Changes(added=set(self.table.held()))
        self._is_registered = self._description is description
        self._changed.set()

    async def _write_changes(self) -> None:
        """Write changes until the description has changed."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self._renewal_s):
                    await self._changed.wait()
                    await asyncio.sleep(BATCH_S)
            self._changed.clear()
            if not self._is_registered:
                return
            changes, self._changes = self._changes, Changes()
            checks = [*self.checks]
            held = set(self.table.held()) if checks else set()
            began_s = time.monotonic()
            await self._write(changes)
            self._waiting_since_s = began_s if self._changes else None
            for check in checks:
                await check(self._writer_state, held)
            await self._renew_if_due()

    async def _renew_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._renewal_s:
            return
        self._plan_renewal()
        await self._index.renew(self._writer_state, load=self._load(), lease_s=self._lease_s)
        self._written_s = time.monotonic()

    def _plan_renewal(self) -> None:
        """Set the time of the next renewal of the lease.

        Call this before a renewal, not after it. So if `renew_soon` is called during the renewal,
        another one follows.
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
        await self._renew_if_due()  # a long series of batches can take longer than a lease


def _slices(fingerprints: set[Fingerprint]) -> Iterator[list[Fingerprint]]:
    remaining = iter(fingerprints)
    while batch := list(islice(remaining, BATCH_BLOCKS)):
        yield batch
