"""The live page's state of the fleet, as one router knows it: a JSON value for each key.

router          this router, its model, and how recent its knowledge of the index is
queue           requests that wait in this router and in all routers, recent waits and rejections
FEATURE         the state of a feature, or what only this page shows of it, by its name; missing if
                the feature is off
ledger          prompt tokens by cause, for the requests in recent.Window, and the places where
                chats' prompts changed
replica/ID      a replica's record, and the sums of its requests
decision/N      where a request went, its result, and a receipt that explains the placement; without
                any text of the request
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from kvroute.blocks.tiers import PEER, SLOWER
from kvroute.contract.records import ReplicaRecord
from kvroute.router.connections.peers import PeerSubscriber
from kvroute.router.connections.replica_states import ReplicaStates
from kvroute.router.index.feed import Feed
from kvroute.router.page.live import State
from kvroute.router.page.prompt_changes import PromptChanges
from kvroute.router.page.recent import Decision, Recent, Sums, summed
from kvroute.router.placement.fleet import Fleet
from kvroute.router.placement.receipts import receipt
from kvroute.settings.router import RouterSettings
from kvroute.store.connection import REDIS_ERRORS
from kvroute.store.index import Index

COUNTED = 100  # replicas counted in one snapshot; all others keep their last numbers of blocks
RECEIPT_REPLICAS = 8  # best-ranked replicas that a receipt shows
STEP = 50  # after this many replicas, a snapshot lets other tasks run

encode = msgspec.json.Encoder().encode


class View:
    """Reads the state of the router's parts, and the replicas' numbers of blocks from Redis."""

    def __init__(
        self,
        recent: Recent,
        settings: RouterSettings,
        *,
        places: PromptChanges,
        index: Index,
        fleet: Fleet,
        feed: Feed,
        states: Callable[[], Awaitable[ReplicaStates]],
        queue: Callable[[], dict[str, Any]],
        features: Callable[[], Mapping[str, dict[str, Any]]],
        live: Callable[[], Awaitable[Mapping[str, Mapping[str, Any]]]],
        peers: PeerSubscriber,
    ) -> None:
        self._recent = recent
        self._places = places
        self._settings = settings
        self._index = index
        self._fleet = fleet
        self._feed = feed
        self._read_states = states
        self._queue = queue
        self._features = features
        self._live = live
        self._peers = peers
        self._blocks: dict[str, int] = {}  # last counted number of blocks by replica id
        self._counted = 0  # index of the replica at which the next count starts

    async def snapshot(self) -> State:
        """Return the current state."""
        records = sorted(self._fleet.replicas.records, key=lambda record: record.id)
        await self._count_blocks(records)
        states = await self._read_states()
        sums = self._recent.window.sums()
        state = {
            "router": encode(self._router() | {"wanted": states.wanted}),
            "queue": encode(self._queue()),
            **{name: encode(state) for name, state in self._features().items()},
            "ledger": encode(summed(sums.values()) | {"broken": self._places.worst()}),
            **{name: encode(state) for name, state in (await self._live()).items()},
        }
        by_id = {record.id: record for record in records}
        for number, (replica_id, status) in enumerate(sorted(states.by_id.items())):
            facts = self._replica(by_id.get(replica_id), sums.get(replica_id))
            state[f"replica/{replica_id}"] = encode({"id": replica_id, "state": status, **facts})
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        for decision in list(self._recent.decisions):
            if decision.attempt.outcome != "moved":  # another decision has the final replica
                state[f"decision/{decision.number}"] = self._decision(decision)
                await asyncio.sleep(0)
        return state

    def _router(self) -> dict[str, Any]:
        settings, feed = self._settings, self._feed.state
        return {
            "id": self._peers.own,
            "routers": 1 + self._peers.alive,
            "model": settings.served_model_name,
            "policy": settings.policy,
            "block_size": settings.block_size,
            "in_flight": self._recent.in_flight,
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
            "pulled_tokens": sums.tokens.pulled if sums else 0,
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
            "pinned_blocks": sum(pin.pinned_blocks for pin in record.pins.values()),
            "running": record.load.running,
            "waiting": record.load.waiting,
        }

    def _decision(self, decision: Decision) -> bytes:
        if decision.summary:
            return decision.summary
        attempt, continued = decision.attempt, self._recent.continued(decision)
        assert attempt.placement is not None, "only this router's own attempts have observers"
        if decision.receipt is None:
            explained = receipt(
                attempt.placement,
                policy=self._settings.policy,
                broken=attempt.context.broken,
                retention=attempt.context.retention,
                is_batch=attempt.context.is_in_lane,
                limit=RECEIPT_REPLICAS,
            )
            decision.receipt = msgspec.Raw(encode(explained))
        waited_s = None if attempt.first_token_s is None else attempt.first_token_s - attempt.sent_s
        ledger, reloaded = attempt.ledger(), attempt.reloaded_tokens
        summary = encode(
            {
                "number": decision.number,
                "at_ms": round(1000 * decision.at_s),
                "replica": attempt.replica_id,
                "of_replicas": len(attempt.placement.ranking),
                "prompt_tokens": attempt.placement.prompt_tokens,
                "expected_tokens": attempt.placement.expected_tokens(attempt.replica_id),
                "cached_tokens": attempt.cached_tokens,
                **{f"{tier.name}_tokens": reloaded.get(tier, 0) for tier in (*SLOWER, PEER)},
                "output_tokens": attempt.output_tokens if attempt.outcome else None,
                "predicted_ttft_s": round(
                    attempt.placement.predicted_ttft_s(attempt.replica_id), 4
                ),
                "ttft_s": None if waited_s is None else round(waited_s, 4),
                "queued_s": round(attempt.context.wait.waited_s, 4),
                "outcome": attempt.outcome,
                "is_resumed": attempt.context.is_resumed,
                # If the replica was lost: where the request was sent then, and how that ended.
                "continued_at": continued and continued.attempt.replica_id,
                "continued_outcome": continued and continued.attempt.outcome,
                "ledger": ledger and msgspec.structs.asdict(ledger),
                "evicted_why": attempt.evicted_why if ledger and ledger.evicted else None,
                "receipt": decision.receipt,
            }
        )
        # A lost replica's decision still changes while another replica continues the answer.
        if attempt.outcome and (attempt.outcome != "failed" or _has_ended(continued)):
            decision.summary = summary
        return summary

    async def _count_blocks(self, records: Sequence[ReplicaRecord]) -> None:
        """Count the blocks of the next COUNTED replicas in rotation.

        If Redis cannot be used, forget all counts.
        """
        start = self._counted % max(1, len(records))
        counted = [*records[start:], *records[:start]][:COUNTED]
        self._counted = start + len(counted)
        try:
            counts = await self._index.counts(counted)
        except REDIS_ERRORS:
            self._blocks = {}
            return
        ids = {record.id for record in records}
        self._blocks = {id_: n for id_, n in self._blocks.items() if id_ in ids} | counts


def _has_ended(continued: Decision | None) -> bool:
    """Return whether the answer that this decision continues can no longer be lost or go on."""
    return continued is not None and continued.attempt.outcome not in (None, "failed")
