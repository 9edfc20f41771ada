"""The audit: compares four lists of the blocks that each replica has cached.

The lists are those of the engine, of the replica's block table, of the index in Redis, and of the
router's mirror, which is a copy of the index. Each replica compares the first three. The router
compares its mirror with Redis, and ignores blocks that change while it reads both.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.audit_report import (
    Comparison,
    ReplicaAudit,
    decode_audit,
)
from kvroute.contract.records import ReplicaRecord
from kvroute.contract.unreadable import DECODE_ERRORS, Unreadable
from kvroute.router.connections.links import Links, UnansweredError
from kvroute.router.index.feed import Feed
from kvroute.router.placement.fleet import Fleet
from kvroute.store.index import FencedError, Index
from kvroute.store.index_values import Position

CALL_S = 15.0  # timeout in seconds for a replica's audit
TRIES = 5  # if the mirror is loading or seems wrong, the best of this many comparisons counts
RETRY_S = 0.5  # seconds between two of these comparisons

ReadAudit = Callable[[str], Awaitable[ReplicaAudit | None]]  # replica id -> its audit


class Audit:
    """Audits all replicas. If the mirror is wrong about a replica, its blocks are reloaded."""

    def __init__(self, index: Index, feed: Feed, fleet: Fleet, read_audit: ReadAudit) -> None:
        self._index = index
        self._feed = feed
        self._mirror = fleet.mirror
        self._replicas = fleet.replicas
        self._read_audit = read_audit
        # Name of a list -> number of wrong blocks that all audits have found in it.
        self.drift = Counter({"replica": 0, "redis": 0, "mirror": 0})

    async def run(self) -> list[dict[str, Any]]:
        """Return a report on each replica that Ray Serve runs and that is in the index.

        A comparison that failed is None.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        indexed = await self._index.records()
        records = [record for record in indexed if self._replicas.is_own(record.id)]
        audits = await asyncio.gather(*(self._read_audit(record.id) for record in records))
        mirrors = [await self._best_of(record) for record in records]
        reports = [
            _report(record, audit, mirror)
            for record, audit, mirror in zip(records, audits, mirrors, strict=True)
        ]
        for report in reports:
            self.drift.update({account: n or 0 for account, n in report["drift"].items()})
        return reports

    async def _best_of(self, record: ReplicaRecord) -> Comparison | None:
        """Compare several times until nothing is wrong; return the best result."""
        best: Comparison | None = None
        for _ in range(TRIES):
            comparison = await self.compare(record.id)
            if comparison is not None and (best is None or comparison.drift < best.drift):
                best = comparison
            if best is not None and not best.drift:
                break
            await asyncio.sleep(RETRY_S)
        if best is not None and best.drift:
            self._feed.request_reload(record.id)
        return best

    async def compare(self, replica_id: str) -> Comparison | None:
        """Compare the mirror's blocks of a replica with Redis; return None if either is loading."""
        position, incarnation = self._feed.position, self._feed.incarnation(replica_id)
        record = await self._index.record(replica_id)
        if record is None or record.incarnation != incarnation:
            return None
        try:
            indexed = set((await self._index.blocks(record)).blocks)
        except FencedError:
            return None
        mirrored = await self._mirrored(replica_id)
        changed = await self._changed_since(position, replica_id)
        if changed is None or self._feed.incarnation(replica_id) != incarnation:
            return None
        return Comparison(
            len(mirrored),
            missing=len(indexed - mirrored - changed),
            surplus=len(mirrored - indexed - changed),
        )

    async def _mirrored(self, replica_id: str) -> set[Fingerprint]:
        blocks = set[Fingerprint]()
        for part in self._mirror.walk(replica_id):
            blocks.update(part)
            await asyncio.sleep(0)  # lets requests run
        return blocks

    async def _changed_since(self, position: Position, replica_id: str) -> set[Fingerprint] | None:
        """Return the replica's blocks that changed since `position`; None if this is unknown."""
        blocks, end = set[Fingerprint](), await self._index.position()
        while position < end:
            start = position
            for next_position, change in await self._index.follow(start, block_ms=1):
                position = next_position
                await asyncio.sleep(0)
                if change is None or change.replica_id != replica_id:
                    continue
                if change.joined or change.cleared:
                    return None
                blocks.update(change.added, change.removed)
            if position == start:
                return None  # Redis has removed these entries from the stream
        return blocks


def audit_reader(links: Links, unreadable: Unreadable) -> ReadAudit:
    """Return a function that reads one replica's audit; it returns None if there is no answer."""

    async def read_audit(replica_id: str) -> ReplicaAudit | None:
        try:
            return decode_audit(await links.call(replica_id, "audit", b"", within_s=CALL_S))
        except UnansweredError:
            return None
        except DECODE_ERRORS as error:
            unreadable.add("audit", replica_id, error)
            return None

    return read_audit


def _report(
    record: ReplicaRecord, replica: ReplicaAudit | None, mirror: Comparison | None
) -> dict[str, Any]:
    return {
        "id": record.id,
        "incarnation": record.incarnation,
        "blocks": {
            "engine": replica and replica.known.true_blocks,
            "replica": replica and replica.known.blocks,
            "redis": replica and replica.index.blocks,
            "mirror": mirror and mirror.blocks,
        },
        "drift": {
            "replica": replica and replica.known.drift,
            "redis": replica and replica.index.drift,
            "mirror": mirror and mirror.drift,
        },
    } | _in_host(replica)


def _in_host(replica: ReplicaAudit | None) -> dict[str, Any]:
    """Return the comparison of blocks in host memory; empty for a replica without host memory."""
    if replica is None or replica.in_host is msgspec.UNSET:
        return {}
    comparison = replica.in_host
    blocks = {"engine": comparison.true_blocks, "replica": comparison.blocks}
    return {"in_host": {"blocks": blocks, "drift": comparison.drift}}
