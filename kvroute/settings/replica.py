"""The settings that a replica receives at its start; they are equal in all replicas of a model."""

from kvroute.settings import parsers
from kvroute.settings.decided import CommonSettings
from kvroute.settings.options.replica import ReplicaOptions
from kvroute.settings.server_list import ServerList


class ReplicaSettings(CommonSettings, ReplicaOptions):
    tensor_parallel_size: int = 1
    cores: int = 1  # CPU cores for the engine of one replica, if it has no GPU
    declared: tuple[str, ...] = ()  # ids of the named prefixes to start with
    lease_s: float = 3.0  # seconds until the replica's record expires in Redis unless it is renewed

    @property
    def server_list(self) -> ServerList:
        """Return the addresses of the attached servers."""
        return ServerList(self.attach, self.attach_file)

    @property
    def is_attached(self) -> bool:
        """Return whether replicas forward requests to servers that the user runs."""
        return bool(self.attach or self.attach_file)

    @property
    def kept_loras(self) -> int:
        """Return how many LoRA adapters an engine keeps in memory."""
        return max(self.max_loras, self.max_cpu_loras)

    def host_cache_bytes(self, node_bytes: int) -> int:
        """Return the host memory of each rank for blocks, on a node with `node_bytes`; 0: none."""
        return (
            parsers.size_bytes(self.host_cache_gb, of_bytes=node_bytes) // self.data_parallel_size
        )

    @property
    def ports(self) -> range:
        """Return the ports from which the replica takes one for the routers' connections."""
        return parsers.ports(self.replica_ports)
