"""Keeps the named prefixes that are assigned to this replica in its KV cache.

Before the replica serves, it computes pinned prefixes only, for a bounded time. It computes the
other prefixes while it serves. Which prefixes are assigned to a replica follows from Redis: from
the declarations and from the records of live replicas. A replica releases a prefix only when the
prefix is deleted, or when every replica that is now assigned to it has computed it. During an
outage of Redis nothing changes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from redis.exceptions import RedisError

from kvroute.contract.generation import GenerateRequest
from kvroute.contract.records import ReplicaRecord, Warm
from kvroute.replica.engine.pins import room_for_pin
from kvroute.replica.engine.protocol import Engine
from kvroute.store.index import Index
from kvroute.store.named_prefix import Prefix, assigned, shared_tokens
from kvroute.store.prefixes import Prefixes

log = logging.getLogger("kvroute.warmer")

POLL_S = 0.5  # seconds between two reads of Redis
# While the replica serves, it computes a prefix in slices, so that running streams continue:
FIRST_SLICE_TOKENS = 64  # length of the first slice, and the minimum
LONGEST_SLICE_TOKENS = 256  # maximum length of a slice
SLICE_S = 0.2  # maximum seconds for a slice; the length is adapted to this
START_S = 60.0  # a start computes prefixes for this many seconds, plus the time of the last one
DECLARED_S = 60.0  # seconds that a start waits until the prefixes in its settings are declared


@dataclass(frozen=True, slots=True)
class _Kept:
    prefix: Prefix
    warm: Warm
    shared_tokens: int  # length of the first part, whose blocks all namespaces share


class Warmer:
    """Computes, pins and releases named prefixes; calls `on_change` when `kept` has changed."""

    def __init__(
        self,
        engine: Engine,
        prefixes: Prefixes,
        index: Index,
        *,
        replica_id: str,
        on_change: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._index = index
        self._replica_id = replica_id
        self._on_change = on_change
        self._revision = 0
        self._declared: list[Prefix] = []  # all declared prefixes, from the last read of Redis
        self._records: list[ReplicaRecord] = []
        self._kept: dict[str, _Kept] = {}
        self._impossible: set[str] = set()  # names that the engine rejected
        self._is_serving = False
        self._slice_blocks = self._blocks_in(FIRST_SLICE_TOKENS)

    def kept(self) -> Mapping[str, Warm]:
        """Return the prefixes whose full blocks are all cached here, by Prefix.name."""
        return {name: kept.warm for name, kept in self._kept.items()}

    async def start(self, declared: Sequence[str]) -> None:
        """Compute the assigned pinned prefixes, after waiting for the ids in `declared`.

        The wait ends after DECLARED_S, the computation after START_S.
        """
        await self._read()
        ends_at_s = time.monotonic() + DECLARED_S
        while missing := set(declared) - {prefix.id for prefix in self._declared}:
            if time.monotonic() >= ends_at_s:
                log.warning(
                    "starting without the prefixes %s: they are not declared in Redis",
                    sorted(missing),
                )
                break
            await asyncio.sleep(POLL_S)
            await self._read()
        pinned = [prefix for prefix in self._assigned() if prefix.is_pinned]
        await self._warm(pinned, within_s=START_S)
        self._is_serving = True

    async def run(self) -> None:
        """Compute and release prefixes as declarations change, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._read()
            await self._release()
            await self._warm(self._assigned())

    async def _read(self) -> None:
        try:
            revision = await self._prefixes.revision()
            if revision not in (0, self._revision):  # 0: Redis lost its data; a router restores it
                self._declared = await self._prefixes.all()
                self._revision = revision
            if any(prefix.replicas is not None for prefix in self._declared):
                self._records = await self._index.records()
        except (RedisError, OSError):
            return  # the publisher logs it

    def _assigned(self) -> list[Prefix]:
        """Return the prefixes assigned to this replica, the oldest first."""
        ids = {record.id for record in self._records} | {self._replica_id}
        now_s = time.time()
        return [
            prefix
            for prefix in self._declared
            if not prefix.is_expired(now_s) and self._replica_id in assigned(prefix, ids)
        ]

    async def _release(self) -> None:
        declared = {prefix.name: prefix for prefix in self._declared}
        assigned_names = {prefix.name for prefix in self._assigned()}
        self._impossible &= declared.keys()
        for name, kept in list(self._kept.items()):
            prefix = declared.get(name)
            if prefix is None or not self._still_has(prefix, kept):
                await self._drop(name)
                continue
            if name not in assigned_names and not self._is_missing_elsewhere(prefix):
                await self._drop(name)

    def _still_has(self, prefix: Prefix, kept: _Kept) -> bool:
        """Return whether `kept` still is this prefix, completely cached.

        It is not if the cache was cleared, if the name was declared anew with other tokens after a
        loss of all data in Redis, or if the length of the shared part has changed.
        """
        is_same = np.array_equal(prefix.token_ids, kept.prefix.token_ids)
        if self._shared_tokens(prefix) != kept.shared_tokens:
            return False
        pins = self._engine.host_pins if kept.warm.is_in_host else self._engine.pins
        return is_same and (prefix.name in pins or not kept.warm.is_pinned)

    def _is_missing_elsewhere(self, prefix: Prefix) -> bool:
        """Return whether another replica is assigned to the prefix and has not computed it yet."""
        if prefix.is_expired(time.time()):
            return False
        records = {record.id: record for record in self._records}
        return any(prefix.name not in records[id_].pins for id_ in assigned(prefix, records))

    async def _warm(self, prefixes: Sequence[Prefix], *, within_s: float = math.inf) -> None:
        """Compute the prefixes in order; start none after `within_s` seconds."""
        if not self._engine.facts.prefix_caching:
            return
        ends_at_s = time.monotonic() + within_s
        for prefix in prefixes:
            is_done = prefix.name in self._impossible or self._is_done(prefix)
            if not is_done and time.monotonic() < ends_at_s:
                await self._warm_one(prefix)

    def _is_done(self, prefix: Prefix) -> bool:
        kept = self._kept.get(prefix.name)
        if kept is None:
            return False
        if kept.warm.is_pinned:
            return True
        return not (prefix.is_pinned and self._has_room(prefix))

    def _has_room(self, prefix: Prefix) -> bool:
        room = room_for_pin(prefix.name, self._engine, prefix.tier)
        return prefix.full_blocks(self._engine.facts.block_size) <= room

    async def _warm_one(self, prefix: Prefix) -> None:
        """Compute a prefix and pin it if it is to be pinned and there is room for it.

        A prefix that the engine rejects is noted and not tried again.
        """
        is_pinned = prefix.is_pinned and self._has_room(prefix)
        try:
            await self._compute(prefix, pin=prefix.name if is_pinned else "")
        except ValueError as error:
            log.warning("the engine rejects the named prefix %s: %s", prefix.name, error)
            self._impossible.add(prefix.name)
            await self._drop(prefix.name)
            return
        if prefix.is_pinned and not is_pinned:
            log.warning(
                "named prefix %s is cached but not pinned: the pinned blocks have reached their "
                "limit; delete a prefix or raise --pin-share",
                prefix.name,
            )
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        warm = Warm(full_blocks, is_pinned, is_pinned and prefix.is_in_host)
        self._kept[prefix.name] = _Kept(prefix, warm, self._shared_tokens(prefix))
        self._on_change()

    async def _compute(self, prefix: Prefix, *, pin: str) -> None:
        """Bring all full blocks of the prefix into the cache.

        While the replica serves, the blocks are computed in slices; after each slice, running
        requests get the same amount of time.
        """
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        if not self._is_serving or not full_blocks:
            await self._compute_first(full_blocks, prefix, pin)
            return
        blocks = 0
        while blocks < full_blocks:
            blocks = min(full_blocks, blocks + self._slice_blocks)
            took_s = await self._compute_first(blocks, prefix, pin)
            self._adapt_slices(took_s)
            if self._is_busy():
                await asyncio.sleep(took_s)

    def _is_busy(self) -> bool:
        load = self._engine.load()
        return load.running + load.waiting > 0

    def _adapt_slices(self, took_s: float) -> None:
        fitting = int(self._slice_blocks * SLICE_S / max(took_s, 1e-6))
        # There is a minimum because took_s may be mostly time in the engine's queue.
        shortest = self._blocks_in(FIRST_SLICE_TOKENS)
        longest = self._blocks_in(LONGEST_SLICE_TOKENS)
        self._slice_blocks = max(shortest, min(fitting, 2 * self._slice_blocks, longest))

    def _blocks_in(self, tokens: int) -> int:
        return max(1, tokens // self._engine.facts.block_size)

    async def _compute_first(self, blocks: int, prefix: Prefix, pin: str) -> float:
        """Bring the first `blocks` blocks into the cache, and return the seconds that it took."""
        began_s = time.monotonic()
        token_ids = prefix.token_ids[: blocks * self._engine.facts.block_size]
        # An engine always computes a prompt's last token. With one more token, whichever it is,
        # all blocks can come from the cache.
        token_ids = np.append(token_ids, prefix.token_ids[:1])
        request = GenerateRequest(
            f"warm {prefix.name} {blocks}",
            token_ids,
            prefix.namespace,
            pin=pin,
            is_host_pin=prefix.is_in_host,
            shared_tokens=self._shared_tokens(prefix),
        )
        await self._engine.generate(request, lambda _: None)
        return time.monotonic() - began_s

    def _shared_tokens(self, prefix: Prefix) -> int:
        if not prefix.namespace:
            return 0
        shared = [declared for declared in self._declared if declared.is_shared]
        return shared_tokens(prefix.token_ids, shared, self._engine.facts.block_size)

    async def _drop(self, name: str) -> None:
        await self._engine.unpin(name)
        if self._kept.pop(name, None):
            self._on_change()
