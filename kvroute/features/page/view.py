"""The live page's state of the fleet, as one router knows it: a JSON value for each key.

router          this router, its model, and how recent its knowledge of the index is
words           what the terms of receipts and the reasons of evictions mean
queue           requests that wait in this router and in all routers, recent waits and rejections
figures         the figures of features (features/figure.py)
ledger          prompt tokens by cause, for the requests of the last minutes
replica/ID      a replica's record, and the sums of its requests
decision/N      where a request went, its result, and a receipt that explains the placement; without
                any text of the request
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from kvroute.blocks.tiers import SLOWER
from kvroute.command.explain import EVICTED, TERMS
from kvroute.contract.records import ReplicaRecord
from kvroute.features.own_methods import own_methods
from kvroute.features.page.decisions import Decisions, encode
from kvroute.features.page.live import State
from kvroute.features.router_feature import RouterFeature
from kvroute.router.observability.recent_requests import Sums, summed
from kvroute.router.serving.status import Status
from kvroute.store.connection import REDIS_ERRORS

if TYPE_CHECKING:
    from kvroute.router.serving.assembly import Parts

COUNTED = 100  # replicas counted in one snapshot; all others keep their last numbers of blocks
STEP = 50  # after this many replicas, a snapshot lets other tasks run


class View:
    """Reads the state of the router's parts, and the replicas' numbers of blocks from Redis."""

    def __init__(self, parts: "Parts", decisions: Decisions) -> None:
        self._parts, self._decisions = parts, decisions
        self._status = Status(parts)
        self._figures = own_methods(parts.features, RouterFeature.figures)
        self._blocks: dict[str, int] = {}  # last counted number of blocks by replica id
        self._counted = 0  # index of the replica at which the next count starts

    async def snapshot(self) -> State:
        """Return the current state."""
        records = sorted(self._parts.fleet.replicas.records, key=lambda record: record.id)
        await self._count_blocks(records)
        states = await self._parts.states.read()
        sums = self._status.recent_sums()
        figures = [figure for figures in self._figures for figure in await figures()]
        state = {
            "router": encode(self._router() | {"wanted": states.wanted}),
            "words": encode({"terms": TERMS, "evicted": EVICTED}),
            "queue": encode(self._status.queue()),
            "figures": encode(figures),
            "ledger": encode(summed(sums.values())),
        }
        by_id = {record.id: record for record in records}
        for number, (replica_id, status) in enumerate(sorted(states.by_id.items())):
            facts = self._replica(by_id.get(replica_id), sums.get(replica_id))
            state[f"replica/{replica_id}"] = encode({"id": replica_id, "state": status, **facts})
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        policy = self._parts.settings.policy
        for decision in list(self._decisions.decisions):
            if decision.attempt.outcome != "moved":  # another decision has the final replica
                state[f"decision/{decision.number}"] = self._decisions.encoded(decision, policy)
                await asyncio.sleep(0)
        return state

    def _router(self) -> dict[str, Any]:
        settings, feed = self._parts.settings, self._parts.feed.state
        return {
            "id": self._parts.subscriber.own,
            "routers": 1 + self._parts.subscriber.alive,
            "model": settings.served_model_name,
            "policy": settings.policy,
            "block_size": settings.block_size,
            "in_flight": self._decisions.in_flight,
            "index": {
                "reachable": feed.is_reachable,
                "age_s": round(feed.age_s, 1),
                "blocks": feed.blocks,
            },
        }

    def _replica(self, record: ReplicaRecord | None, sums: Sums | None) -> dict[str, Any]:
        totals = {
            "requests": sums.requests if sums else 0,
            "prompt_tokens": sums.prompt_tokens if sums else 0,
            "hit_tokens": sums.hit_tokens if sums else 0,
        }
        if record is None:  # the replica has not registered in the index yet
            return totals
        tiers = record.facts.tiers
        return totals | {
            "node": record.whereabouts.node,
            "capacity_blocks": record.facts.capacity_blocks,
            **{
                f"{tier.name}_blocks": tiers[tier].blocks if tier in tiers else 0 for tier in SLOWER
            },
            "cached_blocks": self._blocks.get(record.id),
            "used_blocks": record.load.used_blocks,
            "pinned_blocks": record.load.pinned_blocks,
            "running": record.load.running,
            "waiting": record.load.waiting,
        }

    async def _count_blocks(self, records: Sequence[ReplicaRecord]) -> None:
        """Count the blocks of the next COUNTED replicas in rotation.

        If Redis cannot be used, forget all counts.
        """
        start = self._counted % max(1, len(records))
        counted = [*records[start:], *records[:start]][:COUNTED]
        self._counted = start + len(counted)
        try:
            counts = await self._parts.index.counts(counted)
        except REDIS_ERRORS:
            self._blocks = {}
            return
        ids = {record.id for record in records}
        self._blocks = {id_: n for id_, n in self._blocks.items() if id_ in ids} | counts
