"""What the live page shows of the fleet, as one router sees it: a JSON object for each thing.

router          this router, its model and how well it knows the index
ledger          where the prompts' tokens came from, of the requests in recent.Window
prefixes        the hottest ones, as in GET /v1/cluster/hot
replica/ID      what a replica's record says, and what it answered
decision/N      where a request went, what came of it, and its receipt: numbers, no text
"""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

import msgspec
from redis.exceptions import RedisError

from replica.kvindex.index import Index, ReplicaRecord
from router.insight.live import State
from router.insight.recent import Decision, Recent, Sums, summed
from router.named.hottest import Hottest
from router.routing.feed import Feed
from router.routing.fleet import Fleet
from router.routing.peers import Listener
from router.routing.receipts import receipt
from router.settings import RouterSettings
from router.streams.watch import Watch

COUNTED = 100  # replicas whose blocks are counted in one look; the others keep their last counts
HOT_S = 5.0  # between looks at the hot prefixes, which are tokenised and looked up for it
RECEIPT_REPLICAS = 8  # of a receipt, the ranking's first
STEP = 50  # replicas described before requests have the event loop

encode = msgspec.json.Encoder().encode


class View:
    """Looks at what the router's parts know anyway, and at Redis for the sizes of block sets."""

    def __init__(
        self,
        recent: Recent,
        settings: RouterSettings,
        *,
        index: Index,
        fleet: Fleet,
        feed: Feed,
        watch: Watch,
        hot: Hottest,
        peers: Listener,
    ) -> None:
        self._recent = recent
        self._settings = settings
        self._index = index
        self._fleet = fleet
        self._feed = feed
        self._watch = watch
        self._hot = hot
        self._peers = peers
        self._blocks: dict[str, int] = {}  # by replica id, as last counted
        self._counted = 0  # replicas, on and on around the fleet
        self._prefixes = b"[]"
        self._prefixes_at_s = -HOT_S

    async def look(self) -> State:
        """All there is to see now."""
        records = sorted(self._fleet.records, key=lambda record: record.id)
        await self._count_blocks(records)
        sums = self._recent.window.sums()
        state = {
            "router": encode(self._router()),
            "ledger": encode(summed(sums.values())),
            "prefixes": self._hot_prefixes(),
        }
        states = self._states(records)
        by_id = {record.id: record for record in records}
        for number, (replica_id, how) in enumerate(sorted(states.items())):
            told = self._replica(by_id.get(replica_id), sums.get(replica_id))
            state[f"replica/{replica_id}"] = encode({"id": replica_id, "state": how, **told})
            if number % STEP == STEP - 1:
                await asyncio.sleep(0)
        for decision in list(self._recent.decisions):
            if decision.trip.outcome != "moved":  # another one tells where it went
                state[f"decision/{decision.number}"] = self._decision(decision)
                await asyncio.sleep(0)
        return state

    def _router(self) -> dict[str, Any]:
        settings, feed = self._settings, self._feed.state
        return {
            "id": self._peers.own,
            "routers": 1 + self._peers.heard,
            "model": settings.served_model_name,
            "policy": settings.policy,
            "block_size": settings.block_size,
            "under_way": self._recent.under_way,
            "index": {
                "reachable": feed.is_reachable,
                "age_s": round(feed.age_s, 1),
                "blocks": feed.blocks,
            },
        }

    def _states(self, records: Sequence[ReplicaRecord]) -> dict[str, str]:
        """Of every replica that Serve runs or the index knows, in one word."""
        states = {record.id: "away" for record in records}  # starts, or leaves, or is lost
        states |= dict.fromkeys(self._watch.running(), "silent")  # owes an answer
        states |= dict.fromkeys(self._watch.trusted(), "ready")
        differ = self._fleet.handshake.degraded.keys() & self._watch.trusted()
        states |= dict.fromkeys(differ, "degraded")
        return states

    def _replica(self, record: ReplicaRecord | None, sums: Sums | None) -> dict[str, Any]:
        answered = {
            "requests": sums.requests if sums else 0,
            "prompt_tokens": sums.prompt_tokens if sums else 0,
            "hit_tokens": sums.hit_tokens if sums else 0,
        }
        if record is None:  # not announced yet
            return answered
        return answered | {
            "node": record.facts.get("node"),
            "capacity_blocks": record.facts["capacity_blocks"],
            "cached_blocks": self._blocks.get(record.id),
            "used_blocks": record.load["used_blocks"],
            "pinned_blocks": sum(warm.blocks for warm in record.pins.values() if warm.is_pinned),
            "running": record.load["running"],
            "waiting": record.load["waiting"],
        }

    def _decision(self, decision: Decision) -> bytes:
        if decision.told:
            return decision.told
        trip = decision.trip
        assert trip.placement is not None, "only this router's own trips have witnesses"
        if decision.receipt is None:
            made = receipt(trip.placement, policy=self._settings.policy, most=RECEIPT_REPLICAS)
            decision.receipt = msgspec.Raw(encode(made))
        waited_s = None if trip.first_token_s is None else trip.first_token_s - trip.sent_s
        ledger = trip.ledger()
        told = encode(
            {
                "number": decision.number,
                "at_ms": round(1000 * decision.at_s),
                "replica": trip.replica_id,
                "of_replicas": len(trip.placement.ranking),
                "prompt_tokens": trip.placement.prompt_tokens,
                "expected_tokens": trip.placement.expected_tokens(trip.replica_id),
                "cached_tokens": trip.cached_tokens,
                "output_tokens": trip.output_tokens if trip.outcome else None,
                "predicted_ttft_s": round(trip.placement.predicted_ttft_s(trip.replica_id), 4),
                "ttft_s": None if waited_s is None else round(waited_s, 4),
                "outcome": trip.outcome,
                "is_resumed": trip.asked.is_resumed,
                "ledger": ledger and msgspec.structs.asdict(ledger),
                "receipt": decision.receipt,
            }
        )
        if trip.outcome:
            decision.told = told
        return told

    def _hot_prefixes(self) -> bytes:
        if time.monotonic() - self._prefixes_at_s >= HOT_S:
            self._prefixes = encode(self._hot.top())
            self._prefixes_at_s = time.monotonic()
        return self._prefixes

    async def _count_blocks(self, records: Sequence[ReplicaRecord]) -> None:
        """Of some replicas, others at each look; of none while Redis is away."""
        start = self._counted % max(1, len(records))
        some = [*records[start:], *records[:start]][:COUNTED]
        self._counted = start + len(some)
        try:
            counts = await self._index.counts(some)
        except (RedisError, OSError):
            self._blocks = {}
            return
        known = {record.id for record in records}
        self._blocks = {id_: n for id_, n in self._blocks.items() if id_ in known} | counts
