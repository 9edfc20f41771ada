"""Compares all accounts of the blocks: of the engine, the replica, Redis and this router's mirror.

Each replica compares the first three exactly, between two of its writes. The mirror is compared
with Redis here; blocks that changed while both were read are left out, since they prove nothing.
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
from kvroute.router.index.mirror import Mirror
from kvroute.store.index import FencedError, Index
from kvroute.store.index_values import Position

CALL_S = 15.0  # the longest wait for a replica
TRIES = 5  # to compare the mirror, while it is being loaded or seems wrong; the best result counts
RETRY_S = 0.5

ReadAudit = Callable[[str], Awaitable[ReplicaAudit | None]]  # replica id -> its audit


class Audit:
    """Audits all replicas. RedisError or OSError when Redis is away. Errors found are corrected."""

    def __init__(self, index: Index, feed: Feed, mirror: Mirror, read_audit: ReadAudit) -> None:
        self._index = index
        self._feed = feed
        self._mirror = mirror
        self._read_audit = read_audit
        self.drift = Counter({"replica": 0, "redis": 0, "mirror": 0})  # blocks, of all audits

    async def run(self) -> list[dict[str, Any]]:
        """Return a report on each replica in the index; null for what could not be compared."""
        records = await self._index.records()
        audits = await asyncio.gather(*(self._read_audit(record.id) for record in records))
        mirrors = [await self._best_of(record) for record in records]
        reports = [_report(*each) for each in zip(records, audits, mirrors, strict=True)]
        for report in reports:
            self.drift.update({account: n or 0 for account, n in report["drift"].items()})
        return reports

    async def _best_of(self, record: ReplicaRecord) -> Comparison | None:
        best: Comparison | None = None
        for _ in range(TRIES):
            found = await self.compare(record.id)
            if found is not None and (best is None or found.drift < best.drift):
                best = found
            if best is not None and not best.drift:
                break
            await asyncio.sleep(RETRY_S)
        if best is not None and best.drift:
            self._feed.request_reload(record.id)
        return best

    async def compare(self, replica_id: str) -> Comparison | None:
        """Compare the mirror's blocks of a replica with Redis; None while either is loading."""
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
        found = set[Fingerprint]()
        for part in self._mirror.walk(replica_id):
            found.update(part)
            await asyncio.sleep(0)  # requests go first
        return found

    async def _changed_since(self, position: Position, replica_id: str) -> set[Fingerprint] | None:
        """Blocks that changed there from `position` until now; None if all may have changed."""
        blocks, end = set[Fingerprint](), await self._index.position()
        while position < end:
            begin = position
            for at, change in await self._index.follow(begin, block_ms=1):
                position = at
                await asyncio.sleep(0)
                if change is None or change.replica_id != replica_id:
                    continue
                if change.joined or change.cleared:
                    return None
                blocks.update(change.added, change.removed)
            if position == begin:
                return None  # the stream has dropped the rest
        return blocks


def audit_reader(links: Links, unreadable: Unreadable) -> ReadAudit:
    """Return a function that reads one replica's audit; it returns None without an answer."""

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
    """Return both comparisons of the blocks in host memory; nothing for a replica without any."""
    if replica is None or replica.in_host is msgspec.UNSET:
        return {}
    told = replica.in_host
    blocks = {"engine": told.true_blocks, "replica": told.blocks}
    return {"in_host": {"blocks": blocks, "drift": told.drift}}
