"""The complete settings of one model: what a user has set, and what depends on the machine."""

import os
from collections.abc import Set
from dataclasses import dataclass
from typing import Any

from kvroute.settings.checked_options import CheckedOptions
from kvroute.settings.options.common import CPU_BLOCK_SIZE, GPU_BLOCK_SIZE
from kvroute.settings.options.deployment import DeploymentOptions
from kvroute.settings.replica import ReplicaSettings
from kvroute.settings.router import RouterSettings


@dataclass(frozen=True, slots=True)
class Detected:
    """The settings of a model that depend on the machine."""

    model: str  # what an engine loads: a folder or a hub name
    gpus_per_replica: int
    server_model: str = ""  # see ReplicaSettings


class ModelSettings(ReplicaSettings, RouterSettings, DeploymentOptions):
    """The settings of one model for its replicas, its routers and Ray Serve."""

    gpus_per_replica: int

    def for_replicas(self) -> dict[str, Any]:
        """Return ReplicaSettings as JSON data, for the constructor of the replicas."""
        return self._part(ReplicaSettings.model_fields.keys())

    def for_routers(self) -> dict[str, Any]:
        """Return RouterSettings as JSON data, for the constructor of the routers."""
        return self._part(RouterSettings.model_fields.keys())

    def _part(self, names: Set[str]) -> dict[str, Any]:
        return self.model_dump(mode="json", include=set(names))


def resolve(
    options: CheckedOptions,
    detected: Detected,
    *,
    redis_url: str,
    own_redis: bool,
    cluster: str,
    other_replicas: int,
    drain_timeout_s: float,
    local_only: bool = False,
) -> ModelSettings:
    """Complete the options of a model with default values and the facts of the machine.

    Args:
        options: the options of the model.
        detected: the settings that depend on the machine.
        redis_url: URL of the cluster's Redis.
        own_redis: see RouterSettings.
        cluster: the cluster's id.
        other_replicas: number of replicas of other models, with which the CPU cores are shared.
        drain_timeout_s: the cluster's --drain-timeout-s.
        local_only: see RouterSettings.
    """
    gpus, replicas = detected.gpus_per_replica, options.fleet_size + other_replicas
    chosen = {
        name: getattr(options, name)
        for name in type(options).model_fields
        if name in ModelSettings.model_fields
    }
    derived = {
        "model": detected.model,
        "server_model": detected.server_model,
        "served_model_name": options.name,
        "replicas": options.fleet_size,
        "redis_url": redis_url,
        "own_redis": own_redis,
        "cluster": cluster,
        "local_only": local_only,
        "drain_timeout_s": drain_timeout_s,
        "block_size": options.block_size or (GPU_BLOCK_SIZE if gpus else CPU_BLOCK_SIZE),
        "gpus_per_replica": gpus,
        "tensor_parallel_size": max(1, gpus // options.data_parallel_size),
        "cores": max(1, (os.cpu_count() or 1) // replicas),
        "adapters": options.adapters,
        "features": {
            name: parts.routers for name, parts in options.of_features.items() if parts.routers
        },
        "replica_features": {
            name: parts.replicas for name, parts in options.of_features.items() if parts.replicas
        },
        "environment": {
            name: value
            for parts in options.of_features.values()
            for name, value in parts.environment.items()
        },
    }
    return ModelSettings(**chosen | derived)
