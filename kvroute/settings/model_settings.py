"""The complete settings of one model, as a frozen value."""

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
    """The facts about a model that depend on the machine."""

    model: str  # what an engine loads: a folder or a hub name
    gpus_per_replica: int


class ModelSettings(ReplicaSettings, RouterSettings, DeploymentOptions):
    gpus_per_replica: int

    def for_replicas(self) -> dict[str, Any]:
        """Return ReplicaSettings as JSON data, for the constructor of the replicas."""
        return self._part(ReplicaSettings.model_fields.keys())

    def for_routers(self) -> dict[str, Any]:
        """Return RouterSettings as JSON data, for the constructor of the routers."""
        return self._part(RouterSettings.model_fields.keys())

    def _part(self, names: Set[str]) -> dict[str, Any]:
        return self.model_dump(mode="json", include=set(names))


def decide(
    options: CheckedOptions,
    found: Detected,
    *,
    redis_url: str,
    cluster: str,
    other_replicas: int,
    drain_timeout_s: float,
    local_only: bool = False,
) -> ModelSettings:
    """Complete the user's options.

    Args:
        options: the options of the model.
        found: the facts of the machine.
        redis_url: the Redis of the cluster.
        cluster: the cluster's id.
        other_replicas: number of replicas of other models on the same machines.
        drain_timeout_s: the option of that name, which belongs to the whole cluster.
        local_only: see RouterSettings.
    """
    gpus, replicas = found.gpus_per_replica, options.fleet_size + other_replicas
    given = {
        name: getattr(options, name)
        for name in type(options).model_fields
        if name in ModelSettings.model_fields
    }
    decided = {
        "model": found.model,
        "served_model_name": options.name,
        "replicas": options.fleet_size,
        "redis_url": redis_url,
        "cluster": cluster,
        "local_only": local_only,
        "drain_timeout_s": drain_timeout_s,
        "block_size": options.block_size or (GPU_BLOCK_SIZE if gpus else CPU_BLOCK_SIZE),
        "gpus_per_replica": gpus,
        "tensor_parallel_size": max(1, gpus // options.data_parallel_size),
        "cores": max(1, (os.cpu_count() or 1) // replicas),
        "adapters": options.adapters,
        "tasks": options.tasks,
        "declared": tuple(task.task_id for task in options.tasks),
    }
    return ModelSettings(**given | decided)
