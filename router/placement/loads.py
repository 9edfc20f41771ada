"""The loads of all replicas, as this router knows them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from kvroute.router.placement.load import ReplicaLoad, new_replica_load, slow_replicas
from kvroute.router.placement.replicas import UNKNOWN_SPEED, UNKNOWN_STEP_TOKENS, ReplicaRegistry
from kvroute.router.placement.scale import Scale

# Assumed seconds of one engine step, including the network, until answers show the real value.
UNKNOWN_STEP_S = 0.01


class ReplicaCapacity(NamedTuple):
    """How much more work a replica can take."""

    replica_id: str
    backlog_s: float  # seconds of prefill that are pending
    free_share: float = 1.0  # share of its KV cache that its requests do not need


class Loads:
    """The loads of all replicas that have a record or unanswered requests.

    Args:
        step_s: assumed seconds of one engine step, until answers show the real value.
    """

    def __init__(self, replicas: ReplicaRegistry, *, step_s: float = UNKNOWN_STEP_S) -> None:
        self._replicas = replicas
        self._step_s = step_s
        self._by_id: dict[str, ReplicaLoad] = {}
        self._scale: Scale | None = None  # None: no engine has reported its speed yet

    def update(self) -> None:
        """Use the replicas' latest records, and forget idle replicas without a record."""
        self._by_id = {
            replica_id: load
            for replica_id, load in self._by_id.items()
            if replica_id in self._replicas or load.is_busy
        }
        for replica_id, load in self._by_id.items():
            self._describe(replica_id, load)

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
        """Record how many prompt tokens a replica still has to compute for all routers."""
        if replica_id in self._replicas:
            self.of(replica_id).report(pending_tokens)

    def is_idle(self, replica_id: str) -> bool:
        """Return whether the replica has a valid lease and no unanswered request."""
        load = self._by_id.get(replica_id)
        return self._replicas.has_lease(replica_id) and not (load and load.is_busy)

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

    def capacities(self, replica_ids: Sequence[str], now_s: float) -> list[ReplicaCapacity]:
        """Return the backlog and the free share of the KV cache of each replica."""
        capacities = []
        backlogs_s = self.backlogs_s(replica_ids, now_s)
        for replica_id, backlog_s in zip(replica_ids, backlogs_s, strict=True):
            load = self.of(replica_id)
            capacity = load.capacity_tokens
            free_share = 1.0 - load.kv.tokens / capacity if capacity else 1.0
            capacities.append(ReplicaCapacity(replica_id, backlog_s, free_share))
        return capacities

    def prefill_s(self, replica_id: str, tokens: int) -> float:
        """Return the seconds to compute a prompt of this length if the replica is idle."""
        load = self.of(replica_id)
        return load.speed.slowness * load.model.seconds(0, tokens)

    def _describe(self, replica_id: str, load: ReplicaLoad) -> None:
        """Update a replica's load from its record."""
        load.model = self._replicas.speed(replica_id)
        load.capacity_tokens = self._replicas.kv_tokens(replica_id)
        if record := self._replicas.get(replica_id):
            load.step_tokens = record.facts.step_tokens
            load.report_loras(record.load.loras, record.facts.max_cpu_loras)
