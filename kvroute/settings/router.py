"""The settings that a router receives for one model at its start."""

from kvroute.settings.decided import CommonSettings
from kvroute.settings.multi_task import Task
from kvroute.settings.options.router import RouterOptions


class RouterSettings(CommonSettings, RouterOptions):
    tensor_parallel_size: int = 1  # GPUs of a rank; 1 on CPUs too
    drain_timeout_s: float = 600.0  # value of the option of that name
    tasks: tuple[Task, ...] = ()  # named prefixes to start with
    local_only: bool = False  # only this computer can reach the cluster, which needs no API keys

    @property
    def escapes(self) -> bool:
        """Return whether special tokens in clients' messages are escaped to plain text."""
        given = self.escape_special_tokens
        return self.api_keys is not None if given is None else given
