"""The settings that each replica of a model receives at its start."""

from typing import Any, TypeVar

from pydantic import BaseModel

from kvroute.settings import parsers
from kvroute.settings.options.replica import ReplicaOptions
from kvroute.settings.server_list import (
    ServerList,
    listed_servers,
    names_servers,
    naming_only,
)
from kvroute.settings.shared_settings import CommonSettings

T = TypeVar("T", bound=BaseModel)


class ReplicaSettings(CommonSettings, ReplicaOptions):
    """The settings of all replicas of one model."""

    tensor_parallel_size: int = 1  # GPUs of one data parallel rank; also 1 on CPUs
    cores: int = 1  # number of CPU cores for a replica's engine if it has no GPU
    server_model: str = ""  # the model's name at the attached servers; empty: it may be any
    # Name of a feature -> its settings.
    replica_features: dict[str, dict[str, Any]] = {}  # noqa: RUF012
    environment: dict[str, str] = {}  # noqa: RUF012  # variables for vLLM, unless they are set
    lease_s: float = 3.0  # seconds until a replica's record in Redis expires if it is not renewed

    def in_replica(self, feature: str, kind: type[T]) -> T:
        """Return the settings of a feature, as an instance of the feature's own class."""
        return kind.model_validate(self.replica_features.get(feature, {}))

    @property
    def server_list(self) -> ServerList:
        """Return the addresses of the attached servers, which the user runs."""
        return listed_servers(self)

    @property
    def is_attached(self) -> bool:
        """Return whether replicas forward requests to servers that the user runs."""
        return names_servers(self)

    def attached_to(self, url: str) -> "ReplicaSettings":
        """Return the same settings for a replica whose server has this address."""
        return self.model_copy(update=naming_only(url))

    @property
    def loras_in_memory(self) -> int:
        """Return how many LoRA adapters an engine keeps in memory at most."""
        return max(self.max_loras, self.max_cpu_loras)

    def host_cache_bytes(self, node_bytes: int) -> int:
        """Return how many bytes of host memory each rank has for KV blocks.

        Args:
            node_bytes: the memory of the replica's node.
        """
        return (
            parsers.size_bytes(self.host_cache_gb, of_bytes=node_bytes) // self.data_parallel_size
        )

    @property
    def ports(self) -> range:
        """Return the ports for connections from routers; each replica listens on a free one."""
        return parsers.ports(self.replica_ports)
