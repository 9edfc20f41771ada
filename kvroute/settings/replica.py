"""The settings that a replica receives at its start; all replicas of a model have the same."""

from kvroute.settings import parsers
from kvroute.settings.decided import Decided
from kvroute.settings.options import ReplicaOptions


class ReplicaSettings(Decided, ReplicaOptions):
    tensor_parallel_size: int = 1
    cores: int = 1  # CPU cores for the engine of one replica, without a GPU
    declared: tuple[str, ...] = ()  # ids of the named prefixes to start with
    lease_s: float = 3.0

    @property
    def kept_loras(self) -> int:
        """How many LoRA adapters an engine keeps in memory."""
        return max(self.max_loras, self.max_cpu_loras)

    def host_cache_bytes(self, node_bytes: int) -> int:
        """Of each rank's host tier, on a node with so much memory; 0: it has none."""
        return (
            parsers.size_bytes(self.host_cache_gb, of_bytes=node_bytes) // self.data_parallel_size
        )

    @property
    def ports(self) -> range:
        """Of which one is taken for the routers' connections."""
        return parsers.ports(self.replica_ports)
