"""What the engine holds reaches the index, and the index knows that the replica lives."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

from redis.exceptions import RedisError

from replica.events import BlockTable, Changes, KVEvent
from replica.kvindex.fingerprint import Fingerprint
from replica.kvindex.index import BATCH_BLOCKS, FencedError, Index

log = logging.getLogger("kvroute.publisher")

BATCH_S = 0.005  # changes gather this long before they are written
RETRY_S = 0.5  # between attempts while Redis is away


class Publisher:
    """One engine's changes and heartbeat. Redis being away costs the index, never the engine."""

    def __init__(
        self,
        index: Index,
        table: BlockTable,
        *,
        replica_id: str,
        facts: Mapping[str, Any],
        load: Callable[[], Mapping[str, int]],
        lease_s: float,
    ) -> None:
        self.incarnation = uuid.uuid4().hex[:12]
        self._index = index
        self._table = table
        self._replica_id = replica_id
        self._facts = facts
        self._load = load
        self._lease_s = lease_s
        self._changes = Changes()
        self._changed = asyncio.Event()
        self._is_registered = False
        self._renewal_s = 0.0  # on the event loop's clock

    def publish(self, events: list[KVEvent]) -> None:
        """Takes events in, in the engine's order; returns at once."""
        self._table.apply(events, self._changes)
        if not self._is_registered:
            self._changes = Changes()  # registering announces the whole table: nothing piles up
        elif self._changes:
            self._changed.set()

    async def run(self) -> None:
        """Announces the replica, writes its changes and renews its lease until cancelled."""
        while True:
            try:
                await self._register()
                await self._follow()
            except FencedError:
                log.warning("replica %s lost its lease; announcing it again", self._replica_id)
            except (RedisError, OSError) as away:
                log.warning("Redis is away (%s); next try in %s s", away, RETRY_S)
                await asyncio.sleep(RETRY_S)
            finally:
                self._is_registered = False

    async def leave(self) -> None:
        """Takes the replica out of the index; its lease does so a little later if Redis is away."""
        with contextlib.suppress(RedisError, OSError):
            await self._index.leave(self._replica_id, self.incarnation)

    async def _register(self) -> None:
        await self._index.register(
            self._replica_id,
            self.incarnation,
            facts=self._facts,
            load=self._load(),
            lease_s=self._lease_s,
        )
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
            await self._write(changes)
            await self._renew_if_due()

    async def _renew_if_due(self) -> None:
        if asyncio.get_running_loop().time() < self._renewal_s:
            return
        await self._index.renew(
            self._replica_id, self.incarnation, load=self._load(), lease_s=self._lease_s
        )
        self._plan_renewal()

    def _plan_renewal(self) -> None:
        self._renewal_s = asyncio.get_running_loop().time() + self._lease_s / 3

    async def _write(self, changes: Changes) -> None:
        # Removals first: a batch cut between two writes then claims too little, not too much.
        if changes.cleared:
            await self._change(cleared=True)
        for removed in _slices(changes.removed):
            await self._change(removed=removed)
        for added in _slices(changes.added):
            await self._change(added=added)

    async def _change(self, **change: Any) -> None:
        await self._index.change(
            self._replica_id, self.incarnation, lease_s=self._lease_s, **change
        )
        await self._renew_if_due()  # a long row of writes outlasts a lease


def _slices(fingerprints: set[Fingerprint]) -> Iterator[list[Fingerprint]]:
    remaining = iter(fingerprints)
    while batch := list(islice(remaining, BATCH_BLOCKS)):
        yield batch
