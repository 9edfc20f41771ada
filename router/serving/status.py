"""The state of one model in one router, for the routes and pages of operators."""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvroute.blocks.variants import name_of
from kvroute.contract.ranks import replica_of, replicas_of
from kvroute.contract.records import ReplicaRecord
from kvroute.features import FEATURES
from kvroute.router.api.load_report import cluster_load
from kvroute.router.connections.replica_states import ReplicaStates
from kvroute.router.observability.queue_report import queue_report
from kvroute.router.observability.recent_requests import Sums
from kvroute.router.observability.targets import Target, targets
from kvroute.router.placement.replicas import own_degraded
from kvroute.router.serving.assembly import Parts
from kvroute.store.connection import REDIS_ERRORS

STATUS_S = 1.0  # timeout in seconds for Redis when a client requests the replicas' status


@dataclass(frozen=True, slots=True)
class ModelHealth:
    """Whether a router can answer requests for the model, and whether its index is current."""

    replicas: ReplicaStates
    connected: int  # number of replicas that can take requests, even if some do not answer now
    index_is_reachable: bool
    index_is_writable: bool  # false: the last write to Redis failed
    # Seconds since the router's copy of the index of cached blocks was last equal to the index.
    index_age_s: float
    degraded: dict[str, str]  # replica id -> why it is degraded
    unconnected: dict[str, str]  # replica id -> why the router has no connection to it


def feature_states(models: Iterable["Status"]) -> dict[str, list[dict[str, Any]]]:
    """Return the states of each feature that has states, in the order of the models.

    The list of a feature that is off is empty.
    """
    by_model = [model.features() for model in models]
    return {
        feature.name: [states[feature.name] for states in by_model if feature.name in states]
        for feature in FEATURES
        if feature.has_state
    }


class Status:
    """Reads the state of a model's parts. It changes nothing."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._model = parts.settings.served_model_name

    # For the cluster's routes.

    @property
    def running(self) -> list[str]:
        """Return the ids of the ranks that can get a request now."""
        away = self._parts.links.away()
        return [id_ for id_ in self._parts.liveness.running() if replica_of(id_) not in away]

    @property
    def max_model_len(self) -> int | None:
        """Return the most tokens that a prompt and its response may have together.

        The result is None if no replica has reported it yet.
        """
        return self._parts.fleet.replicas.max_model_len

    async def health(self) -> ModelHealth:
        """Return the model's health, for load balancers and operators."""
        feed, degraded = self._parts.feed.state, own_degraded(self._parts.fleet.replicas)
        return ModelHealth(
            await self._parts.states.read(),
            connected=len(replicas_of(self.running)),
            index_is_reachable=feed.is_reachable,
            index_is_writable=self._parts.neighbours.can_write,
            index_age_s=feed.age_s,
            degraded=dict(degraded),
            unconnected=self._parts.links.unconnected(),
        )

    async def replicas(self) -> list[dict[str, Any]]:
        """Return every replica in the index that has not ended.

        If Redis does not answer in time, return the replicas that this router last read from it.
        """
        try:
            async with asyncio.timeout(STATUS_S):
                records, counts = await self._parts.index.replica_status()
        except REDIS_ERRORS:
            records, counts = self._parts.fleet.replicas.records, {}
        states = (await self._parts.states.read()).by_id
        return [
            self._replica(record, counts.get(record.id)) | {"state": state}
            for record in records
            if (state := states.get(record.id, states.get(replica_of(record.id))))
        ]

    async def metrics_targets(self) -> list[Target]:
        """Return the addresses from which the metrics of the model's processes can be read.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        return await targets(self._parts.index, self._model)

    def queue(self) -> dict[str, Any]:
        """Return the waiting requests of this router and of all known routers, and recent waits."""
        now = queue_report(self._parts.queue, time.monotonic())
        recent = self._parts.telemetry.recent_waits.as_json()
        return {"model": self._model, **now, "recent": recent}

    def recent(self) -> dict[str, Any]:
        """Return this router's recent requests: rate, cache hits, times to first token."""
        sums = self.recent_sums().values()
        return {
            "model": self._model,
            **self._parts.telemetry.recent_answers.as_json(),
            "prompt_tokens": sum(replica_sums.prompt_tokens for replica_sums in sums),
            "cached_tokens": sum(replica_sums.hit_tokens for replica_sums in sums),
        }

    def features(self) -> dict[str, dict[str, Any]]:
        """Return the states of the features that are on and have one, by name."""
        states = {side.name: side.state() for side in self._parts.features}
        return {
            name: {"model": self._model, **state}
            for name, state in states.items()
            if state is not None
        }

    def load(self) -> dict[str, float]:
        """Return the load of the replicas and of this router's queue, by vLLM's metric names."""
        queued = sum(state.requests for state in self._parts.holding.states().values())
        return cluster_load(self._parts.fleet.replicas.own_records, queued=queued)

    # For the diagnosis.

    async def leases_s(self) -> dict[str, float]:
        """Return how many seconds are left of each replica's lease.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        return await self._parts.index.leases_s()

    async def lost_servers(self) -> dict[str, str]:
        """Return the attached servers to which no requests can be sent, and why: URL -> reason.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        return await self._parts.attached.away()

    async def clusters(self) -> dict[str, Any]:
        """Return this cluster and others that serve the model through this Redis.

        Raises:
            RedisError, OSError: Redis cannot be used.
        """
        return await self._parts.neighbours.report()

    def unreadable(self) -> list[dict[str, Any]]:
        """Return the records in Redis that could not be decoded, as one entry per kind."""
        return [
            {"model": self._model, "kind": kind, **summary}
            for kind, summary in self._parts.unreadable.report().items()
        ]

    def engine_problems(self) -> dict[str, Any]:
        """Return what replicas report about their engines.

        Returns:
            unfit: replica -> which parts are off because they do not fit vLLM, and why.
            guessed_caches: the attached servers that send no events.
            rendering_differences: replica -> prompts that routers rendered differently from vLLM.
        """
        records = self._parts.fleet.replicas.own_records
        servers = {record.facts.server for record in records if record.facts.guesses_cache}
        return {
            "unfit": {record.id: record.facts.unfit for record in records if record.facts.unfit},
            "guessed_caches": sorted(servers),
            "rendering_differences": {
                record.id: record.load.rendering_differences for record in records
            },
        }

    def wire(self) -> dict[str, dict[str, str]]:
        """Return where the router connects to each replica, and how this is encrypted.

        Returns:
            Replica id -> `host`, and `tls` (wire/address.py: TlsMode).
        """
        return self._parts.links.wire()

    def speeds(self) -> dict[str, dict[str, Any]]:
        """Return how busy and how slow replicas are.

        Returns:
            backlogs_s: replica -> the seconds of prefill that are queued or running there.
            slow: replica -> the factor by which it is slower.
        """
        fleet, running = self._parts.fleet, self.running
        backlogs_s = fleet.loads.backlogs_s(running, time.monotonic())
        return {
            "backlogs_s": dict(zip(running, backlogs_s, strict=True)),
            "slow": fleet.loads.slow_replicas(running),
        }

    def blamed(self) -> list[dict[str, Any]]:
        """Return the requests that stopped a replica and are refused for some minutes."""
        return [{"model": self._model, **entry} for entry in self._parts.blamed.as_json()]

    def recent_sums(self) -> dict[str, Sums]:
        """Return the sums over the prompts of the last minutes, by replica."""
        return self._parts.telemetry.recent_tokens.sums()

    def _replica(self, record: ReplicaRecord, blocks: int | None) -> dict[str, Any]:
        return {
            "id": record.id,
            "own": self._parts.fleet.replicas.is_own(record.id),
            "pid": record.whereabouts.pid,
            "incarnation": record.incarnation,
            "node": record.whereabouts.node,
            "server": record.facts.server or None,
            "block_size": record.facts.block_size,
            "blocks": blocks,
            "capacity_blocks": record.facts.capacity_blocks,
            "running": record.load.running,
            "waiting": record.load.waiting,
            "loras": [name_of(variant) for variant in record.load.variants],
            "unfit": record.facts.unfit,
            "degraded": self._parts.fleet.replicas.degraded.get(record.id),
            "tool_parser": record.facts.tool_parser,
            "reasoning_parser": record.facts.reasoning_parser,
        } | self._parts.fleet.replicas.tiers_as_json(record.id)
