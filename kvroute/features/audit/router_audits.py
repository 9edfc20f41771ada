"""The audit: compares four lists of the blocks that each replica has cached.

The lists are those of the engine, of the replica's block table, of the index in Redis, and of the
router's mirror, which is a copy of the index. Each replica compares the first three. The router
compares its mirror with Redis, and ignores blocks that change while it reads both.
"""

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import msgspec

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.comparison import Comparison
from kvroute.contract.records import ReplicaRecord
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.audit import UNREADABLE
from kvroute.features.audit.audit_report import ReplicaAudit, decode_audit
from kvroute.features.audit.canaries import Canaries
from kvroute.features.router_feature import RouterFeature
from kvroute.router.connections.links import UnansweredError
from kvroute.store.index import FencedError
from kvroute.store.index_values import Position

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

    from kvroute.process.exposition import Readings
    from kvroute.router.serving.assembly import Parts

CALL_S = 15.0  # timeout in seconds for a replica's audit
TRIES = 5  # if the mirror is loading or seems wrong, the best of this many comparisons counts
RETRY_S = 0.5  # seconds between two of these comparisons


class RouterAudits(RouterFeature):
    """Audits all replicas. If the mirror is wrong about a replica, its blocks are reloaded."""

    name = "audit"
    canaries: Canaries  # from `attach` on

    def __init__(self) -> None:
        # Name of a list -> number of wrong blocks that all audits have found in it.
        self.drift = Counter({"replica": 0, "redis": 0, "mirror": 0})

    def attach(self, parts: "Parts") -> None:
        self._index, self._feed, self._fleet = parts.index, parts.feed, parts.fleet
        self._links, self._unreadable = parts.links, parts.unreadable
        self.canaries = Canaries(
            parts.index, parts.fleet, parts.links, block_size=parts.settings.block_size
        )

    def metrics(self, registry: "CollectorRegistry", readings: "Readings") -> None:
        readings.labelled_counter(
            "account",
            "kvroute_audit_drift_blocks",
            "Wrong blocks that this router's audits found, by account: replica (differs from its "
            "engine), redis (differs from the replica), mirror (differs from Redis).",
            lambda: self.drift,
        )

    async def run(self) -> list[dict[str, Any]]:
        """Return a report on each replica that Ray Serve runs and that is in the index.

        A comparison that failed is None.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        indexed = await self._index.records()
        records = [record for record in indexed if self._fleet.replicas.is_own(record.id)]
        audits = await asyncio.gather(*(self._audit(record.id) for record in records))
        mirrors = [await self._best_of(record) for record in records]
        reports = [
            _report(record, audit, mirror)
            for record, audit, mirror in zip(records, audits, mirrors, strict=True)
        ]
        for report in reports:
            self.drift.update({account: n or 0 for account, n in report["drift"].items()})
        return reports

    async def _audit(self, replica_id: str) -> ReplicaAudit | None:
        """Return a replica's audit; None if there is no answer."""
        try:
            answer = await self._links.call(replica_id, "audit", b"", within_s=CALL_S)
            return decode_audit(answer)
        except UnansweredError:
            return None
        except DECODE_ERRORS as error:
            self._unreadable.add(UNREADABLE, replica_id, error)
            return None

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
        for part in self._fleet.mirror.walk(replica_id):
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
