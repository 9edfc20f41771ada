"""The audits and canaries of one replica: what the core calls."""

import asyncio
from collections.abc import Mapping

import msgspec
from msgspec.structs import replace

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.comparison import Comparison
from kvroute.features.audit.audit_report import ReplicaAudit
from kvroute.features.replica_feature import Method, ReplicaBase, ReplicaFeature
from kvroute.replica.engine.protocol import Engine
from kvroute.replica.publisher import Publisher
from kvroute.store.index import FencedError, Index
from kvroute.store.index_values import WriterState
from kvroute.wire.structs import decode_begin

AUDIT_S = 10.0  # timeout of an audit, in seconds; an audit waits for the engine and for Redis


class RankAudits:
    """The audits of one rank, one after the other."""

    def __init__(self, publisher: Publisher, engine: Engine, index: Index) -> None:
        self._publisher, self._table = publisher, publisher.table
        self._engine, self._index = engine, index
        self._lock = asyncio.Lock()
        self._result: asyncio.Future[ReplicaAudit]  # of the running audit

    async def run(self) -> ReplicaAudit:
        """Compare the blocks in the engine, the table and the index, and repair any difference.

        This is also right under load. During an outage of Redis, it waits until Redis is back.
        """
        async with self._lock:
            self._result, self._table.compared = asyncio.get_running_loop().create_future(), None
            self._publisher.checks.append(self._compare)
            try:
                await self._publisher.request_cached_blocks(self._engine)
                return await self._result
            finally:
                self._publisher.checks.remove(self._compare)

    async def _compare(self, written: WriterState, held: set[Fingerprint]) -> None:
        """Compare the index with `held`, the fingerprints that it should have; set the result.

        Raises:
            FencedError: They differ. The replica then registers again with all its blocks.
        """
        known = self._table.compared
        if known is None or self._result.done():
            return  # the engine has not listed its blocks yet, or the audit is over
        record = await self._index.record(written.replica_id)
        if record is None or record.incarnation != written.incarnation:
            return  # the state in Redis is lost or another process's: the next write notices it
        index = Comparison.of(set((await self._index.blocks(record)).blocks), held)
        if not self._result.done():
            self._result.set_result(
                ReplicaAudit(
                    written.replica_id,
                    written.incarnation,
                    written.seq,
                    known=known,
                    index=index,
                    in_host=self._table.compared_in_host or msgspec.UNSET,
                )
            )
        if index.drift:
            raise FencedError(
                f"the replica's set in Redis differs by {index.drift} blocks from what the replica "
                f"has written as {written}"
            )


class ReplicaAudits(ReplicaFeature):
    """Audits the ranks of a replica, and runs canaries."""

    name = "audit"

    def __init__(self, base: ReplicaBase) -> None:
        self._ranks = base.ranks
        self._audits = [RankAudits(rank.publisher, rank.engine, base.index) for rank in base.ranks]

    def methods(self) -> Mapping[str, Method]:
        return {"audit": self._audit, "canary": self._canary}

    async def _audit(self, _: bytes, rank: int) -> bytes:
        """Return an encoded ReplicaAudit of a rank.

        Raises:
            TimeoutError: The engine or Redis does not respond.
        """
        async with asyncio.timeout(AUDIT_S):
            return msgspec.json.encode(await self._audits[rank].run())

    async def _canary(self, begin: bytes, rank: int) -> bytes:
        """Run a test request. Metrics do not count it, because no client sent it."""
        _, request = decode_begin(begin)
        await self._ranks[rank].engine.generate(replace(request, rank=rank), lambda _: None)
        return b""
