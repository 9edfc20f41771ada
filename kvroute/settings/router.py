"""The settings that each router receives at its start, for each model."""

from typing import Any, TypeVar

from pydantic import BaseModel

from kvroute.settings.options.router import RouterOptions
from kvroute.settings.shared_settings import CommonSettings

T = TypeVar("T", bound=BaseModel)


class RouterSettings(CommonSettings, RouterOptions):
    """The settings of all routers for one model."""

    tensor_parallel_size: int = 1  # GPUs of one data parallel rank; also 1 on CPUs
    drain_timeout_s: float = 600.0  # seconds that a removed replica has to finish its requests
    own_redis: bool = False  # True: kvroute serve has started Redis, and starts it again
    features: dict[str, dict[str, Any]] = {}  # noqa: RUF012  # name of a feature -> its settings
    local_only: bool = False  # True: only this machine can reach the cluster, and there are no keys

    def of(self, feature: str, kind: type[T]) -> T:
        """Return the settings of a feature, as an instance of the feature's own class."""
        return kind.model_validate(self.features.get(feature, {}))

    @property
    def escapes_special_tokens(self) -> bool:
        """Return whether special tokens in clients' messages are escaped to plain text."""
        if self.escape_special_tokens is None:
            return self.api_keys is not None
        return self.escape_special_tokens
