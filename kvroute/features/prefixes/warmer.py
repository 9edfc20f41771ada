"""Computes the named prefixes that are assigned to this replica, so that they are cached.

A named prefix is a beginning of prompts that was declared in advance (named_prefix.py). Each
replica reads the declarations and the records of live replicas in Redis, and derives from them
which prefixes are assigned to it. Before the replica serves requests, it computes only the pinned
prefixes, for a limited time. It computes the other prefixes while it serves.

A replica releases a deleted prefix at once, and one that now belongs to other replicas when all of
them have computed it. During an outage of Redis nothing changes.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from kvroute.contract.generation import EngineAwayError, GenerateRequest, NotBegunError
from kvroute.contract.records import ReplicaRecord
from kvroute.features.prefixes.named_prefix import Prefix, assigned, shared_tokens
from kvroute.features.prefixes.prefix_store import Prefixes
from kvroute.features.prefixes.warm import Warm, warm_at
from kvroute.replica.engine.pins import free_pin_blocks
from kvroute.replica.engine.protocol import Engine
from kvroute.store.connection import REDIS_ERRORS
from kvroute.store.index import Index
from kvroute.store.revision import Follower

log = logging.getLogger("kvroute.warmer")

POLL_S = 0.5  # seconds between two reads of Redis
# While the replica serves, it computes a prefix in slices, so that running streams are not delayed.
MIN_SLICE_TOKENS = 64  # minimum length of a slice, and the length of the first slice
MAX_SLICE_TOKENS = 256  # maximum length of a slice
MAX_SLICE_S = 0.2  # target for the maximum time of a slice; the slices' length is adapted to it
# Seconds in which a starting replica computes prefixes before it serves. A prefix that it has begun
# to compute before this limit is computed to its end.
MAX_START_S = 60.0
# Most seconds that a starting replica waits for its settings' prefixes to be declared in Redis.
MAX_DECLARATION_WAIT_S = 60.0


@dataclass(frozen=True, slots=True)
class _CachedPrefix:
    prefix: Prefix
    warm: Warm  # the prefix's state in this replica's cache, as published
    shared_tokens: int  # length of the first part of the prefix, which all namespaces share


class Warmer:
    """Computes, pins and releases named prefixes.

    It calls `on_change` when the result of `cached` has changed.
    """

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
        self._index = index
        self._replica_id = replica_id
        self._on_change = on_change
        self._declared = Follower(prefixes, restores=False)
        self._clock = prefixes.clock
        self._records: list[ReplicaRecord] = []
        self._cached: dict[str, _CachedPrefix] = {}
        self._rejected: set[str] = set()  # names that the engine rejected
        self._is_serving = False
        self._slice_blocks = self._blocks_in(MIN_SLICE_TOKENS)

    def cached(self) -> Mapping[str, Warm]:
        """Return the state of each prefix that this replica has computed, by Prefix.name."""
        return {name: cached.warm for name, cached in self._cached.items()}

    async def start(self, declared: Sequence[str]) -> None:
        """Wait until the prefixes in `declared` are in Redis, then compute the pinned prefixes.

        The wait takes at most MAX_DECLARATION_WAIT_S, and the computation about MAX_START_S.

        Args:
            declared: Ids of the prefixes that the replica's settings name.
        """
        await self._read()
        ends_at_s = time.monotonic() + MAX_DECLARATION_WAIT_S
        while missing := set(declared) - {prefix.id for prefix in self._declared.values}:
            if time.monotonic() >= ends_at_s:
                log.warning(
                    "starting without the prefixes %s: they are not declared in Redis; they are "
                    "computed as soon as they are declared",
                    sorted(missing),
                )
                break
            await asyncio.sleep(POLL_S)
            await self._read()
        pinned = [prefix for prefix in self._assigned() if prefix.is_pinned]
        await self._warm(pinned, within_s=MAX_START_S)
        self._is_serving = True

    async def run(self) -> None:
        """Compute and release prefixes as declarations change, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._read()
            await self._release()
            await self._warm(self._assigned())

    async def _read(self) -> None:
        with suppress(*REDIS_ERRORS):  # the publisher logs the outage
            await self._declared.refresh()
            if any(prefix.replicas is not None for prefix in self._declared.values):
                self._records = await self._index.records()

    def _assigned(self) -> list[Prefix]:
        """Return the prefixes assigned to this replica, the oldest first."""
        ids = {record.id for record in self._records} | {self._replica_id}
        now_s = self._clock.now_s()
        return [
            prefix
            for prefix in self._declared.values
            if not prefix.is_expired(now_s) and self._replica_id in assigned(prefix, ids)
        ]

    async def _release(self) -> None:
        declared = {prefix.name: prefix for prefix in self._declared.values}
        assigned_names = {prefix.name for prefix in self._assigned()}
        self._rejected &= declared.keys()
        for name, cached in list(self._cached.items()):
            prefix = declared.get(name)
            if prefix is None or not self._is_still_cached(prefix, cached):
                await self._drop(name)
                continue
            if name not in assigned_names and not self._is_missing_at_another_replica(prefix):
                await self._drop(name)

    def _is_still_cached(self, prefix: Prefix, cached: _CachedPrefix) -> bool:
        """Return whether `cached` is still a complete copy of this prefix in the cache.

        Return False in these cases:
        - The cache was cleared.
        - Redis lost its data, and the name was declared again with other tokens.
        - The length of the part that all namespaces share has changed.
        """
        has_same_tokens = np.array_equal(prefix.token_ids, cached.prefix.token_ids)
        if self._shared_tokens(prefix) != cached.shared_tokens:
            return False
        pins = self._engine.host_pins if cached.warm.is_in_host else self._engine.pins
        return has_same_tokens and (prefix.name in pins or not cached.warm.is_pinned)

    def _is_missing_at_another_replica(self, prefix: Prefix) -> bool:
        """Return whether some replica that the prefix is assigned to has not computed it yet."""
        if prefix.is_expired(self._clock.now_s()):
            return False
        records = {record.id: record for record in self._records}
        return any(prefix.name not in warm_at(records[id_]) for id_ in assigned(prefix, records))

    async def _warm(self, prefixes: Sequence[Prefix], *, within_s: float = math.inf) -> None:
        """Compute the prefixes in order. After `within_s` seconds, begin no further prefix."""
        if not self._engine.facts.prefix_caching:
            return
        ends_at_s = time.monotonic() + within_s
        for prefix in prefixes:
            is_done = prefix.name in self._rejected or self._is_done(prefix)
            if not is_done and time.monotonic() < ends_at_s:
                await self._warm_one(prefix)

    def _is_done(self, prefix: Prefix) -> bool:
        """Return whether the prefix is cached, and is pinned if it should and can be pinned."""
        cached = self._cached.get(prefix.name)
        if cached is None:
            return False
        if cached.warm.is_pinned:
            return True
        return not (prefix.is_pinned and self._can_pin(prefix))

    def _can_pin(self, prefix: Prefix) -> bool:
        free_blocks = free_pin_blocks(prefix.name, self._engine, prefix.tier)
        return prefix.full_blocks(self._engine.facts.block_size) <= free_blocks

    async def _warm_one(self, prefix: Prefix) -> None:
        """Compute a prefix. Pin it if its declaration says so and the limit of pins allows it.

        A prefix that the engine rejects is not tried again. If the engine is away, the prefix is
        tried again when prefixes are next checked.
        """
        is_pinned = prefix.is_pinned and self._can_pin(prefix)
        try:
            await self._compute(prefix, pin=prefix.name if is_pinned else "")
        except ValueError as error:
            log.warning(
                "named prefix %s is not cached, because the engine rejects it: %s",
                prefix.name,
                error,
            )
            self._rejected.add(prefix.name)
            await self._drop(prefix.name)
            return
        except (EngineAwayError, NotBegunError) as error:
            log.debug("named prefix %s is not cached yet: %s", prefix.name, error)
            return
        if prefix.is_pinned and not is_pinned:
            log.warning(
                "named prefix %s is cached but not pinned: the pinned blocks have reached their "
                "limit; delete a prefix or raise --pin-share",
                prefix.name,
            )
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        warm = Warm(full_blocks, is_pinned, is_pinned and prefix.is_in_host)
        self._cached[prefix.name] = _CachedPrefix(prefix, warm, self._shared_tokens(prefix))
        self._on_change()

    async def _compute(self, prefix: Prefix, *, pin: str) -> None:
        """Bring all full blocks of the prefix into the cache.

        While the replica serves, the blocks are computed in slices. If the engine has other
        requests, each slice is followed by a pause that is as long as the slice took. `pin` is the
        name of the prefix's pin; empty: the prefix is not pinned.
        """
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        if not self._is_serving or not full_blocks:
            await self._compute_blocks(full_blocks, prefix, pin)
            return
        blocks = 0
        while blocks < full_blocks:
            blocks = min(full_blocks, blocks + self._slice_blocks)
            took_s = await self._compute_blocks(blocks, prefix, pin)
            self._adapt_slices(took_s)
            if self._is_busy():
                await asyncio.sleep(took_s)

    def _is_busy(self) -> bool:
        load = self._engine.load()
        return load.running + load.waiting > 0

    def _adapt_slices(self, took_s: float) -> None:
        fitting = int(self._slice_blocks * MAX_SLICE_S / max(took_s, 1e-6))
        # The minimum is needed because took_s may be mostly time in the engine's queue.
        shortest = self._blocks_in(MIN_SLICE_TOKENS)
        longest = self._blocks_in(MAX_SLICE_TOKENS)
        self._slice_blocks = max(shortest, min(fitting, 2 * self._slice_blocks, longest))

    def _blocks_in(self, tokens: int) -> int:
        return max(1, tokens // self._engine.facts.block_size)

    async def _compute_blocks(self, blocks: int, prefix: Prefix, pin: str) -> float:
        """Bring the prefix's first `blocks` blocks into the cache; return the seconds it took."""
        began_s = time.monotonic()
        token_ids = prefix.token_ids[: blocks * self._engine.facts.block_size]
        # An engine always computes a prompt's last token. So one token is appended (it does not
        # matter which), and all blocks before it can come from the cache.
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
        shared = [declared for declared in self._declared.values if declared.is_shared]
        block_size = self._engine.facts.block_size
        return shared_tokens(prefix.token_ids, shared, block_size, self._clock.now_s())

    async def _drop(self, name: str) -> None:
        await self._engine.unpin(name)
        if self._cached.pop(name, None):
            self._on_change()
