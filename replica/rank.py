"""A data parallel rank of a replica: one engine, and everything that belongs to it.

The publisher writes the engine's blocks to the index. Backlog, ghost list and missed share are
statistics about the engine.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from statistics import fmean

from msgspec import structs

from kvroute.blocks.tiers import DISK, GROUPS, HOST
from kvroute.contract.generation import Chunk, Emit, GenerateRequest, client_id
from kvroute.contract.records import Description, EngineFacts, Load
from kvroute.process.tracing import Tracing
from kvroute.replica.backlog import Backlog, occupancy
from kvroute.replica.block_table import BlockTable
from kvroute.replica.engine.copy_speed import CopySpeed
from kvroute.replica.engine.kv_events import KVEvent, LayoutChanged, Transfers
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.engine_metrics import ReplicaMetrics
from kvroute.replica.ghosts import MissedShare, make_ghosts
from kvroute.replica.publisher import Publisher
from kvroute.store.index import Index

log = logging.getLogger("kvroute.replica")


class Rank:
    """Runs requests on one engine and publishes the engine's blocks."""

    def __init__(
        self,
        engine: Engine,
        index: Index,
        metrics: ReplicaMetrics,
        tracing: Tracing | None,
        *,
        rank_id: str,
        description: Description,
        lease_s: float,
        is_shared: bool = False,
        reports: Callable[[], dict[str, bytes]],
    ) -> None:
        self.id = rank_id
        self.engine = engine
        self.backlog = Backlog(engine.facts.prefill_tokens_per_s)
        table = BlockTable(engine.group_entries)
        self.ghosts = make_ghosts(engine, table)
        self.missed_share = MissedShare(self.ghosts)
        self._divide(engine.facts, engine.group_entries)
        self._metrics = metrics
        self._reports = reports
        self._run = tracing.traced(engine.generate) if tracing else engine.generate
        self.publisher = Publisher(
            index,
            table,
            replica_id=rank_id,
            description=description,
            load=self._load,
            lease_s=lease_s,
            is_shared=is_shared,
        )

    def _divide(self, facts: EngineFacts, entries: Sequence[int | None]) -> None:
        """Measure the copies of each slower tier, and count the engine's groups."""
        self._copies = {tier: CopySpeed(each.bytes_per_s) for tier, each in facts.tiers.items()}
        # Number of KV cache groups in the engine's own memory. Each slower tier has as many groups.
        in_tiers = {entry // GROUPS for entry in entries if entry is not None}
        self._groups = len(entries) // max(1, len(in_tiers))

    def follow_events(self) -> "asyncio.Task[None]":
        """Start the task that publishes the engine's events until it is cancelled."""
        events = self.publisher.receive_events(self.engine, self._record_events)
        return asyncio.create_task(events, name="events")

    async def keep_in_index(self) -> None:
        """Publish the rank's blocks until cancelled, except while the engine is away."""
        while True:
            async with asyncio.TaskGroup() as tasks:
                publishing = tasks.create_task(self.publisher.run(), name="publisher")
                await self.engine.wait_until_away()
                publishing.cancel()
            await self.publisher.leave()
            await self.engine.wait_until_back()

    def _record_events(self, events: Sequence[KVEvent]) -> None:
        self._metrics.record_events(events, self._groups)
        self.ghosts.record_events(events)
        for event in events:
            if isinstance(event, Transfers):
                self._record_copies(event, time.monotonic())
            elif isinstance(event, LayoutChanged):
                self._divide(event.facts, event.group_entries)

    def _record_copies(self, moved: Transfers, now_s: float) -> None:
        if host := self._copies.get(HOST):
            host.record(moved.in_bytes, moved.in_s, now_s)
        if disk := self._copies.get(DISK):
            disk.record(moved.disk_in_bytes, moved.disk_in_s, now_s)

    def _load(self) -> Load:
        load, now_s = self.engine.load(), time.monotonic()
        speeds = {
            f"{tier.name}_bytes_per_s": copies.bytes_per_s(now_s)
            for tier, copies in self._copies.items()
        }
        return structs.replace(
            load, pinned_blocks=self._pinned_blocks(), features=self._reports(), **speeds
        )

    def _pinned_blocks(self) -> int:
        return sum(self.engine.pins.values())

    async def generate(self, request: GenerateRequest, emit: Emit) -> None:
        """Run a request and emit its chunks. Cancelling this call aborts the request."""
        is_first, tokens, began_s = True, 0, time.monotonic()
        new_tokens = len(request.token_ids) - request.expected_tokens
        self.backlog.add(
            request.request_id, new_tokens, began_s, request.waited_s, is_batch=request.is_batch
        )

        def count(chunk: Chunk) -> None:
            nonlocal is_first, tokens
            if chunk.token_ids:
                if is_first:
                    self._record_first_token(request)
                    self.missed_share.record_computed(len(request.token_ids) - chunk.cached_tokens)
                self._metrics.record_chunk(request, chunk, is_first=is_first)
                is_first = False
                tokens += len(chunk.token_ids)
            emit(chunk)

        try:
            await self._run(request, count)
        finally:
            now_s = time.monotonic()
            self.backlog.remove(request.request_id, now_s)
            log.info(
                "generated %d tokens in %.1f ms",
                tokens,
                1e3 * (now_s - began_s),
                extra={"request_id": client_id(request.request_id)},
            )

    def _record_first_token(self, request: GenerateRequest) -> None:
        self.backlog.first_token(request.request_id, time.monotonic())
        if request.variant:
            self.publisher.renew_soon()  # the list of loaded adapters may have changed

    def occupancy(self, now_s: float) -> float:
        """Return the use of the rank's scarcest resource, from 0 to 1."""
        facts, load = self.engine.facts, self.engine.load()
        # Pinned blocks do not count, because a further replica would have to hold the same pins.
        pinned_blocks = self._pinned_blocks()
        return occupancy(
            busy_share=self.backlog.busy_share(now_s),
            running=load.running,
            max_running=facts.max_num_seqs,
            used_blocks=load.used_blocks - pinned_blocks,
            blocks=facts.capacity_blocks - pinned_blocks,
        )


def autoscaling_stats(ranks: Sequence[Rank], now_s: float) -> dict[str, float]:
    """Return a replica's numbers for kvroute/autoscaling.py.

    `wait_s` is the lower quartile of the ranks' waits, because new requests go to the ranks that
    are less busy. For the same reason, autoscaling.py uses the lower quartile of the replicas.
    """
    waits_s = sorted(rank.backlog.wait_s(now_s) for rank in ranks)
    return {
        "wait_s": waits_s[(len(waits_s) - 1) // 4],
        "service_s": fmean(rank.backlog.service_s() for rank in ranks),
        "occupancy": fmean(rank.occupancy(now_s) for rank in ranks),
        "missed": fmean(rank.missed_share.share(now_s) for rank in ranks),
    }
