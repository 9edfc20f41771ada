"""The settings that both replicas and routers receive."""

from kvroute.contract.adapters import Adapter
from kvroute.settings import parsers
from kvroute.settings.encryption import tls_of
from kvroute.settings.options.common import CPU_BLOCK_SIZE, CommonOptions
from kvroute.store.keys import DEFAULT_CLUSTER
from kvroute.wire.tls import WireTls


class CommonSettings(CommonOptions):
    """The common options, each with a final value, even if the user has not set it.

    In contrast to the option, `model` is always one model: the folder or the hub name that an
    engine loads.
    """

    served_model_name: str  # the model name that clients send
    redis_url: str
    cluster: str = DEFAULT_CLUSTER
    block_size: int = CPU_BLOCK_SIZE  # tokens of one KV block
    adapters: tuple[Adapter, ...] = ()  # the LoRA adapters that clients can request

    @property
    def tls(self) -> WireTls:
        """Return how connections between routers and replicas are encrypted."""
        return tls_of(self)

    @property
    def metrics_ports(self) -> range:
        """Return the ports for metrics; each process listens on a free one."""
        return parsers.ports(self.metrics_port_range)
