"""A replica's share of the named prefixes is warm before it serves, and stays so.

Each replica finds its share by itself, from what Redis holds: declarations, and the records of the
living. What it keeps it lets go only when the prefix is dropped, or when all replicas that it is
assigned to by now have it. While Redis is away everything stays as it is.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from redis.exceptions import RedisError

from replica.kvindex.index import Index, ReplicaRecord, Warm
from replica.kvindex.prefixes import Prefix, Prefixes, assigned
from replica.pins import room_for_pin
from replica.protocol import Engine, GenerateRequest, Sampling

log = logging.getLogger("kvroute.warmer")

POLL_S = 0.5  # between looks at Redis
FIRST_SLICE_TOKENS = 64  # computed in one go while the replica serves ...
LONGEST_SLICE_TOKENS = 256
SLICE_S = 0.2  # ... and how long that may take, so that streams go on
DECLARED_S = 60.0  # the longest a start waits for the prefixes that it was told of

COMPUTE = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class _Kept:
    prefix: Prefix
    warm: Warm


class Warmer:
    """Computes, pins and lets go. tell: called whenever `kept` has changed."""

    def __init__(
        self,
        engine: Engine,
        prefixes: Prefixes,
        index: Index,
        *,
        replica_id: str,
        tell: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._prefixes = prefixes
        self._index = index
        self._replica_id = replica_id
        self._tell = tell
        self._revision = 0
        self._declared: list[Prefix] = []  # as Redis had them last
        self._records: list[ReplicaRecord] = []
        self._kept: dict[str, _Kept] = {}
        self._impossible: set[str] = set()  # names that the engine refuses
        self._is_serving = False
        self._slice_blocks = self._blocks_in(FIRST_SLICE_TOKENS)

    def kept(self) -> Mapping[str, Warm]:
        """What is warm here as a whole, by Prefix.name."""
        return {name: kept.warm for name, kept in self._kept.items()}

    async def start(self, declared: Sequence[str]) -> None:
        """This replica's share is warm. The ids in `declared` are waited for, for a minute."""
        await self._read()
        ends_at_s = time.monotonic() + DECLARED_S
        while missing := set(declared) - {prefix.id for prefix in self._declared}:
            if time.monotonic() >= ends_at_s:
                log.warning("starts without %s, which nobody declared in Redis", sorted(missing))
                break
            await asyncio.sleep(POLL_S)
            await self._read()
        await self._warm_share()
        self._is_serving = True

    async def run(self) -> None:
        """Follows what is declared until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            await self._read()
            await self._let_go()
            await self._warm_share()

    async def _read(self) -> None:
        try:
            revision = await self._prefixes.revision()
            if revision not in (0, self._revision):  # 0: Redis lost all, and will be told again
                self._declared = await self._prefixes.all()
                self._revision = revision
            if any(prefix.replicas is not None for prefix in self._declared):
                self._records = await self._index.records()
        except (RedisError, OSError):
            return  # the publisher tells of it

    def _share(self) -> list[Prefix]:
        """Oldest first, as they should be warmed."""
        ids = {record.id for record in self._records} | {self._replica_id}
        now_s = time.time()
        return [
            prefix
            for prefix in self._declared
            if not prefix.is_expired(now_s) and self._replica_id in assigned(prefix, ids)
        ]

    async def _let_go(self) -> None:
        declared = {prefix.name: prefix for prefix in self._declared}
        share = {prefix.name for prefix in self._share()}
        self._impossible &= declared.keys()
        for name, kept in list(self._kept.items()):
            prefix = declared.get(name)
            if prefix is None or not self._still_has(prefix, kept):
                await self._drop(name)
                continue
            if name not in share and not self._is_missing_elsewhere(prefix):
                await self._drop(name)

    def _still_has(self, prefix: Prefix, kept: _Kept) -> bool:
        """Not when the cache was cleared, nor when a Redis that had lost all gave the name anew."""
        is_same = np.array_equal(prefix.token_ids, kept.prefix.token_ids)
        return is_same and (prefix.name in self._engine.pins or not kept.warm.is_pinned)

    def _is_missing_elsewhere(self, prefix: Prefix) -> bool:
        """A replica that it is assigned to has yet to warm it."""
        if prefix.is_expired(time.time()):
            return False
        records = {record.id: record for record in self._records}
        return any(prefix.name not in records[id_].pins for id_ in assigned(prefix, records))

    async def _warm_share(self) -> None:
        if not self._engine.facts.prefix_caching:
            return
        for prefix in self._share():
            if prefix.name not in self._impossible and not self._is_done(prefix):
                await self._warm(prefix)

    def _is_done(self, prefix: Prefix) -> bool:
        kept = self._kept.get(prefix.name)
        if kept is None:
            return False
        return kept.warm.is_pinned or not prefix.is_pinned or not self._has_room(prefix)

    def _has_room(self, prefix: Prefix) -> bool:
        room = room_for_pin(prefix.name, self._engine.pins, self._engine.facts)
        return prefix.full_blocks(self._engine.facts.block_size) <= room

    async def _warm(self, prefix: Prefix) -> None:
        """The prefix is kept, unpinned where pins have no room for it; or known as impossible."""
        is_pinned = prefix.is_pinned and self._has_room(prefix)
        try:
            await self._compute(prefix, pin=prefix.name if is_pinned else "")
        except ValueError as error:
            log.warning("named prefix %s cannot be warmed: %s", prefix.name, error)
            self._impossible.add(prefix.name)
            await self._drop(prefix.name)
            return
        if prefix.is_pinned and not is_pinned:
            log.warning("named prefix %s is not pinned: pins have no room for it", prefix.name)
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        self._kept[prefix.name] = _Kept(prefix, Warm(full_blocks, is_pinned))
        self._tell()

    async def _compute(self, prefix: Prefix, *, pin: str) -> None:
        """All full blocks are in the cache. Before the replica serves, nobody has to wait for that;
        then they come in slices, and while others run they get as much time after each."""
        full_blocks = prefix.full_blocks(self._engine.facts.block_size)
        if not self._is_serving or not full_blocks:
            await self._compute_first(full_blocks, prefix, pin)
            return
        blocks = 0
        while blocks < full_blocks:
            blocks = min(full_blocks, blocks + self._slice_blocks)
            took_s = await self._compute_first(blocks, prefix, pin)
            self._adapt_slices(took_s)
            load = self._engine.load()
            if load.running or load.waiting:
                await asyncio.sleep(took_s)

    def _adapt_slices(self, took_s: float) -> None:
        fitting = int(self._slice_blocks * SLICE_S / max(took_s, 1e-6))
        shortest = self._blocks_in(FIRST_SLICE_TOKENS)  # most of its time may have been a queue
        longest = self._blocks_in(LONGEST_SLICE_TOKENS)
        self._slice_blocks = max(shortest, min(fitting, 2 * self._slice_blocks, longest))

    def _blocks_in(self, tokens: int) -> int:
        return max(1, tokens // self._engine.facts.block_size)

    async def _compute_first(self, blocks: int, prefix: Prefix, pin: str) -> float:
        """The first blocks are in the cache; the seconds that it took."""
        began_s = time.monotonic()
        token_ids = prefix.token_ids[: blocks * self._engine.facts.block_size]
        # With one token after them, whichever, all blocks can come from the cache.
        token_ids = np.append(token_ids, prefix.token_ids[:1])
        request = GenerateRequest(f"warm {prefix.name} {blocks}", token_ids, COMPUTE, pin=pin)
        async for _ in self._engine.generate(request):
            pass
        return time.monotonic() - began_s

    async def _drop(self, name: str) -> None:
        await self._engine.unpin(name)
        if self._kept.pop(name, None):
            self._tell()
