"""The loads of all replicas, as this router knows them.

Batch requests give way to all others in the engines. So each replica has a second load, the lane,
for its batch requests. The placement and the waits of other requests do not depend on the lane.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.router.placement.load import ReplicaLoad, new_replica_load, slow_replicas
from kvroute.router.placement.replicas import UNKNOWN_SPEED, UNKNOWN_STEP_TOKENS, ReplicaRegistry
from kvroute.router.placement.scale import Scale

# Assumed seconds of one engine step, including the network, until answers show the real value.
UNKNOWN_STEP_S = 0.01
# While a replica has other requests, its batch requests may hold this share of its KV cache:
# KV_PART * (share that the others leave free - KV_RESERVE), within KV_BOUNDS. While it has none,
# they may hold the share KV_ALONE, and the rest stays free for requests that arrive. In simulation,
# constant shares of 0.08 and 0.12 made the p90 of others' time to the first token 13 to 25% longer
# (one seed), and this rule makes it at most 12% longer (four seeds, docs/measurements.md).
KV_PART, KV_RESERVE, KV_BOUNDS = 0.3, 0.4, (0.05, 0.2)
KV_ALONE = 0.9
# Further limits for a replica's batch requests: the first number while it has other requests, the
# second while it has none.
REQUEST_SHARES = 0.5, 0.9  # share of max_num_seqs, the most requests in an engine's step
PENDING_STEPS = 1.0, 3.0  # prompt tokens still to compute, as a multiple of a full step
# A replica counts as having no other requests only after this time without one, in Scale.busy_s,
# since the next one often follows soon.
QUIET = 0.44


# The limits and loads that decide which requests fit. With equal states, the same requests fit.
RoomState = tuple[float, ...]


class LaneRoom(NamedTuple):
    """How many further batch requests a replica can take."""

    lane: ReplicaLoad  # the replica's open batch requests
    kv_tokens: float  # the most KV tokens that they may hold
    pending_tokens: float  # the most prompt tokens that may wait for their computation
    requests: float  # the most requests

    @property
    def is_open(self) -> bool:
        """Return whether the replica can take a small batch request."""
        return not self.lane.is_busy or (
            self.lane.pending_tokens < self.pending_tokens
            and self.lane.unanswered < self.requests
            and self.lane.kv.tokens < self.kv_tokens
        )

    @property
    def state(self) -> RoomState:
        lane = self.lane
        return (*self[1:], lane.pending_tokens, lane.unanswered, lane.kv.tokens)

    def fits(self, *, new_tokens: int, cached_tokens: int, prefix: Fingerprint | None) -> bool:
        """Return whether the replica can take this request; a lane without requests always can.

        Args:
            new_tokens: prompt tokens that the replica has to compute.
            cached_tokens: the other tokens of the prompt.
            prefix: see KvUse.needed.
        """
        lane = self.lane
        if not lane.is_busy:
            return True
        answers = (lane.unanswered + 1) * lane.answer_tokens
        needed = lane.kv.needed(new_tokens=new_tokens, cached_tokens=cached_tokens, prefix=prefix)
        is_soon = not lane.waiting or lane.pending_tokens + new_tokens <= self.pending_tokens
        return is_soon and lane.unanswered < self.requests and needed + answers <= self.kv_tokens


class ReplicaCapacity(NamedTuple):
    """How much more work a replica can take."""

    replica_id: str
    backlog_s: float  # seconds of prefill that are pending
    free_share: float = 1.0  # share of its KV cache that its requests do not need
    lane: LaneRoom | None = None  # room for batch requests; None: not asked for


class Loads:
    """The loads of all replicas that have a record or unanswered requests.

    Args:
        step_s: assumed seconds of one engine step, until answers show the real value.
    """

    def __init__(self, replicas: ReplicaRegistry, *, step_s: float = UNKNOWN_STEP_S) -> None:
        self._replicas = replicas
        self._step_s = step_s
        self._by_id: dict[str, ReplicaLoad] = {}
        self._lanes: dict[str, ReplicaLoad] = {}  # batch requests; only replicas that got any
        # Replica id -> time at which it was last seen with other requests than batch requests.
        self._busy_at_s: dict[str, float] = {}
        self._scale: Scale | None = None  # None: no engine has reported its speed yet

    def update(self) -> None:
        """Use the replicas' latest records, and forget idle replicas without a record."""
        self._by_id, self._lanes = self._kept(self._by_id), self._kept(self._lanes)
        for replica_id, load in (*self._by_id.items(), *self._lanes.items()):
            self._describe(replica_id, load)
        self._busy_at_s = {
            replica_id: at_s
            for replica_id, at_s in self._busy_at_s.items()
            if replica_id in self._by_id
        }

    def _kept(self, loads: dict[str, ReplicaLoad]) -> dict[str, ReplicaLoad]:
        """Return the loads of replicas that have a record or unanswered requests."""
        return {
            replica_id: load
            for replica_id, load in loads.items()
            if replica_id in self._replicas or load.is_busy
        }

    def of(self, replica_id: str) -> ReplicaLoad:
        """Return the load of a replica; it is created if the replica is new."""
        load = self._by_id.get(replica_id)
        if load is None:
            load = new_replica_load(
                self._replicas.speed(replica_id),
                self._replicas.step_tokens(replica_id),
                self._by_id.values(),
                step_s=self._step_s,
            )
            self._by_id[replica_id] = load
            self._describe(replica_id, load)
        return load

    def lane(self, replica_id: str) -> ReplicaLoad:
        """Return the load of a replica's batch requests; it is created if there was none."""
        lane = self._lanes.get(replica_id)
        if lane is None:
            lane = self._lanes[replica_id] = ReplicaLoad(self._replicas.speed(replica_id))
            self._describe(replica_id, lane)
        return lane

    def of_all(self, replica_ids: Sequence[str]) -> list[ReplicaLoad]:
        """Return the load of each replica. Placement uses this, as it is faster than `of`."""
        loads = self._by_id
        return [loads.get(replica_id) or self.of(replica_id) for replica_id in replica_ids]

    def by_id(self) -> dict[str, ReplicaLoad]:
        """Return all loads, by replica id."""
        return dict(self._by_id)

    @property
    def scale(self) -> Scale:
        """Return the fleet's units of time. They start as the prefill time of a full step."""
        if self._scale is not None:
            return self._scale
        first = next(iter(self._replicas.records), None)
        if first is None:
            return Scale(UNKNOWN_SPEED.seconds(0, UNKNOWN_STEP_TOKENS))
        speed = self._replicas.speed(first.id)
        self._scale = Scale(speed.seconds(0, first.facts.step_tokens))
        return self._scale

    def report(self, replica_id: str, pending_tokens: int) -> None:
        """Record how many prompt tokens a replica still has to compute for all routers.

        Batch requests do not count.
        """
        if replica_id in self._replicas:
            self.of(replica_id).report(pending_tokens)

    def is_idle(self, replica_id: str) -> bool:
        """Return whether the replica has a valid lease and no unanswered request."""
        loads = self._by_id.get(replica_id), self._lanes.get(replica_id)
        is_busy = any(load.is_busy for load in loads if load)
        return self._replicas.has_lease(replica_id) and not is_busy

    def backlogs_s(self, replica_ids: Sequence[str], now_s: float) -> list[float]:
        """Return the seconds of prefill that are queued or running on each replica."""
        loads = [self.of(replica_id) for replica_id in replica_ids]
        return [load.backlog_s(load.speed.slowness, now_s) for load in loads]

    def slow_replicas(self, replica_ids: Sequence[str]) -> dict[str, float]:
        """Return the replicas that are much slower than the others: id -> factor (load.py)."""
        return slow_replicas({replica_id: self.of(replica_id) for replica_id in replica_ids})

    def slowness(self) -> dict[str, float]:
        """Return each replica's slowness: measured prefill time divided by the predicted time."""
        return {replica_id: load.speed.slowness for replica_id, load in self._by_id.items()}

    def next_free_s(self, replica_ids: Sequence[str], limit_s: float, now_s: float) -> float:
        """Return the seconds until the first replica's backlog falls below `limit_s`.

        The result is infinite if each backlog stays above the limit until its replica has sent the
        next first token.
        """
        loads = [self.of(replica_id) for replica_id in replica_ids]
        return min([load.time_until_below_s(limit_s, now_s) for load in loads], default=math.inf)

    def lane_backlogs_s(self, replica_ids: Sequence[str], now_s: float) -> list[float]:
        """Return the pending seconds of prefill of each replica's batch requests."""
        lanes, loads = self._lanes, self.of_all(replica_ids)
        return [
            lanes[replica_id].backlog_s(load.speed.slowness, now_s) if replica_id in lanes else 0.0
            for replica_id, load in zip(replica_ids, loads, strict=True)
        ]

    def capacities(
        self, replica_ids: Sequence[str], now_s: float, *, lanes: bool = False
    ) -> list[ReplicaCapacity]:
        """Return the backlog and the free share of the KV cache of each replica.

        Args:
            replica_ids: the replicas.
            now_s: the current time.
            lanes: whether to return the room for batch requests, too.
        """
        capacities = []
        backlogs_s = self.backlogs_s(replica_ids, now_s)
        for replica_id, backlog_s in zip(replica_ids, backlogs_s, strict=True):
            load = self.of(replica_id)
            capacity = load.capacity_tokens
            free_share = 1.0 - load.kv.tokens / capacity if capacity else 1.0
            room = self._lane_room(replica_id, load, now_s) if lanes else None
            capacities.append(ReplicaCapacity(replica_id, backlog_s, free_share, room))
        return capacities

    def _lane_room(self, replica_id: str, load: ReplicaLoad, now_s: float) -> LaneRoom:
        """Return the room for batch requests on a replica, whose other requests are `load`."""
        if load.is_busy:
            self._busy_at_s[replica_id] = now_s
        quiet_s = now_s - self._busy_at_s.get(replica_id, -math.inf)
        is_alone = quiet_s > QUIET * self.scale.busy_s
        record = self._replicas.get(replica_id)
        max_requests = record.facts.max_num_seqs if record else 0
        capacity = load.capacity_tokens or math.inf
        return LaneRoom(
            lane=self.lane(replica_id),
            kv_tokens=(KV_ALONE if is_alone else _kv_share(load)) * capacity,
            pending_tokens=PENDING_STEPS[is_alone] * load.step_tokens,
            requests=REQUEST_SHARES[is_alone] * (max_requests or math.inf),
        )

    def prefill_s(self, replica_id: str, tokens: int) -> float:
        """Return the seconds to compute a prompt of this length if the replica is idle."""
        load = self.of(replica_id)
        return load.computing_s(0, tokens)

    def _describe(self, replica_id: str, load: ReplicaLoad) -> None:
        """Update a replica's load from its record."""
        load.model = self._replicas.speed(replica_id)
        load.capacity_tokens = self._replicas.kv_tokens(replica_id)
        if record := self._replicas.get(replica_id):
            load.step_tokens = record.facts.step_tokens
            load.held_tokens = record.load.used_blocks * record.facts.block_size
            load.engine_waiting = record.load.waiting
            load.report_variants(record.load.variants, record.facts.max_variants)


def _kv_share(load: ReplicaLoad) -> float:
    """Return the share of the KV cache for batch requests, beside the requests of `load`."""
    if not load.capacity_tokens:
        return 1.0
    free = 1.0 - load.kv.tokens / load.capacity_tokens
    low, high = KV_BOUNDS
    return min(high, max(low, KV_PART * (free - KV_RESERVE)))
