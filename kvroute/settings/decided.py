"""The common settings of replicas and routers, with values for options that a user may omit."""

from kvroute.contract.adapters import Adapter
from kvroute.settings import parsers
from kvroute.settings.options.common import CPU_BLOCK_SIZE, CommonOptions
from kvroute.store.keys import DEFAULT_CLUSTER


class CommonSettings(CommonOptions):
    """The common settings. `model` is what an engine loads: a folder or a hub name."""

    served_model_name: str
    redis_url: str
    cluster: str = DEFAULT_CLUSTER
    block_size: int = CPU_BLOCK_SIZE  # tokens
    adapters: tuple[Adapter, ...] = ()  # the LoRA adapters

    @property
    def metrics_ports(self) -> range:
        """Return the ports from which each process takes one for its metrics."""
        return parsers.ports(self.metrics_port_range)
