"""What the engine holds reaches the index, and the index knows that the replica lives.

Whatever Redis lost or mixed up is noticed at the next write, after a third of the lease at most;
RETRY_S later the replica is announced anew with all that it holds. While somebody else has its id,
it waits until that one has left or its lease is over.
"""

import asyncio
import contextlib
import logging
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from replica.events import BlocksHeld, BlockTable, Changes, Comparison, EventsLost, KVEvent
from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import BATCH_BLOCKS, FencedError, Index, Standing, Warm
from replica.kvindex.outage import Outage
from replica.protocol import Engine, ReplicaAudit

log = logging.getLogger("kvroute.publisher")

BATCH_S = 0.005  # changes gather this long before they are written
RETRY_S = 0.5  # before the replica is announced again


class Publisher:
    """One engine's changes and heartbeat. Redis being away costs the index, never the engine."""

    def __init__(
        self,
        index: Index,
        table: BlockTable,
        *,
        replica_id: str,
        facts: Mapping[str, Any],
        load: Callable[[], Mapping[str, Any]],
        pins: Callable[[], Mapping[str, Warm]] = dict,
        lease_s: float,
    ) -> None:
        self._index = index
        self._table = table
        self._replica_id = replica_id
        self._facts = facts
        self._load = load
        self._pins = pins
        self._lease_s = lease_s
        self._changes = Changes()
        self._changed = asyncio.Event()
        self._standing = Standing(replica_id, "")  # of the last registration, or attempt at one
        self._was_registered = False  # at any time
        self._is_registered = False
        self._outage = Outage(log, f"replica {replica_id} will be announced again")
        self._renewal_s = 0.0  # on the event loop's clock
        self.registrations = 0
        self._waiting_since_s: float | None = None  # on the monotonic clock; None: nothing waits
        self._taken_s = time.monotonic()  # when Redis last took anything
        self._known: Comparison | None = None  # by the engine, for the audit under way
        self._audit: asyncio.Future[ReplicaAudit] | None = None
        self._one_audit = asyncio.Lock()

    @property
    def blocks(self) -> int:
        """That the index should have of the replica."""
        return len(self._table)

    @property
    def lag_s(self) -> float:
        """Age of the oldest change that the index does not have; 0 when it has all."""
        since_s = self._waiting_since_s
        return 0.0 if since_s is None else time.monotonic() - since_s

    @property
    def lease_age_s(self) -> float:
        """Since the index last took anything."""
        return time.monotonic() - self._taken_s

    def publish(self, events: list[KVEvent]) -> None:
        """Takes events in, in the engine's order; returns at once.

        What waits to be written is never more than twice the engine's blocks, or one batch.
        """
        self._known = self._table.apply(events, self._changes) or self._known
        if self._changes and self._waiting_since_s is None:
            self._waiting_since_s = time.monotonic()
        if not self._is_registered:
            self._changes = Changes()  # registering announces the whole table: nothing piles up
        elif len(self._changes.removed) > max(len(self._table), BATCH_BLOCKS):
            self._changes = Changes(cleared=True, added=set(self._table.held()))
        if self._changes or self._audit:
            self._changed.set()

    def renew_soon(self) -> None:
        """Load and pins reach the record within milliseconds; returns at once."""
        self._renewal_s = 0.0
        self._changed.set()

    async def hear(
        self, engine: Engine, witness: Callable[[Sequence[KVEvent]], None] = lambda events: None
    ) -> None:
        """Publishes what the engine tells until cancelled, and lets the witness know it.

        After a loss, the engine says what it holds: what is not there is forgotten, and what was
        lost and is there stays unknown.
        """
        async for events in engine.events():
            witness(events)
            self.publish(events)
            if EventsLost() in events:
                await self._have_told(engine)

    async def audit(self, engine: Engine) -> ReplicaAudit:
        """Engine, table and index compared with each other at one moment of theirs, whatever they
        are doing; what is found wrong is put right. Takes as long as the index is away."""
        async with self._one_audit:
            self._known, self._audit = None, asyncio.get_running_loop().create_future()
            try:
                await self._have_told(engine)
                return await self._audit
            finally:
                self._audit = None

    async def _have_told(self, engine: Engine) -> None:
        if engine.facts.prefix_caching:
            await engine.tell_held()
        else:
            self.publish([BlocksHeld({})])

    async def run(self) -> None:
        """Announces the replica, writes its changes and renews its lease until cancelled."""
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
        """Takes the replica out of the index; its lease does so a little later if Redis is away."""
        with contextlib.suppress(RedisError, OSError):
            await self._index.leave(self._replica_id, self._standing.incarnation)

    async def _register(self) -> None:
        """The first time it replaces whoever had the id; later, that one is newer and stays."""
        if self._was_registered:
            await self._index.leave(self._replica_id, self._standing.incarnation)
        self._standing = Standing(self._replica_id, uuid.uuid4().hex[:12])
        await self._index.register(
            self._replica_id,
            self._standing.incarnation,
            replaces=not self._was_registered,
            facts=self._facts,
            load=self._load(),
            pins=self._pins(),
            lease_s=self._lease_s,
        )
        self._outage.end()
        self._was_registered = True
        self.registrations += 1
        self._plan_renewal()
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
        """Nothing is written meanwhile, so the index should have exactly what was held."""
        standing, known = self._standing, self._known
        record = await self._index.record(self._replica_id)
        if known is None or record is None or record.incarnation != standing.incarnation:
            return  # the next renewal finds out why
        index = Comparison.of(set((await self._index.blocks(record)).blocks), held)
        if not audit.done():
            audit.set_result(
                ReplicaAudit(
                    self._replica_id, standing.incarnation, standing.seq, known=known, index=index
                )
            )
        if index.drift:
            raise FencedError(f"Redis has {index.drift} blocks other than {standing} announced")

    async def _renew_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._renewal_s:
            return
        await self._index.renew(
            self._standing, load=self._load(), pins=self._pins(), lease_s=self._lease_s
        )
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        self._renewal_s = asyncio.get_running_loop().time() + self._lease_s / 3
        self._taken_s = time.monotonic()

    async def _write(self, changes: Changes) -> None:
        # Removals first: a batch cut between two writes then claims too little, not too much.
        if changes.cleared:
            await self._change(cleared=True)
        for removed in _slices(changes.removed):
            await self._change(removed=removed)
        for added in _slices(changes.added):
            await self._change(added=added)

    async def _change(self, **change: Any) -> None:
        self._standing = await self._index.change(self._standing, lease_s=self._lease_s, **change)
        await self._renew_if_due()  # a long row of writes outlasts a lease


def _slices(fingerprints: set[Fingerprint]) -> Iterator[list[Fingerprint]]:
    remaining = iter(fingerprints)
    while batch := list(islice(remaining, BATCH_BLOCKS)):
        yield batch
