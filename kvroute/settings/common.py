"""The settings that replicas and routers have in common."""

from kvroute.contract.adapters import Adapter
from kvroute.settings import parsers
from kvroute.settings.options.common import CPU_BLOCK_SIZE, CommonOptions
from kvroute.store.keys import DEFAULT_CLUSTER


class CommonSettings(CommonOptions):
    """The common options with final values, also for the options that a user has omitted.

    `model` is what an engine loads: a folder or a hub name.
    """

    served_model_name: str  # the model name that clients send
    redis_url: str
    cluster: str = DEFAULT_CLUSTER
    block_size: int = CPU_BLOCK_SIZE  # tokens of one KV block
    adapters: tuple[Adapter, ...] = ()  # the LoRA adapters that clients can request

    @property
    def metrics_ports(self) -> range:
        """Return the ports from which each process takes one for its metrics."""
        return parsers.ports(self.metrics_port_range)
