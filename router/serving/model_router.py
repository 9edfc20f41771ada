"""The parts of one model's router that the HTTP routes use."""

from functools import partial
from typing import TypeVar

from kvroute.features.router_feature import RouterFeature, live_states
from kvroute.process.draining import draining
from kvroute.router.page.live import Live
from kvroute.router.page.view import View
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.lifecycle import Lifecycle
from kvroute.router.serving.request_handler import RequestHandler
from kvroute.router.serving.status import Status

F = TypeVar("F", bound=RouterFeature)

MAX_NAME = 129  # the most characters of an adapter's name, with the colon before it


class ModelRouter:
    """Everything that the HTTP routes need for one model. `lifecycle` starts and ends its tasks."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self.base = parts.base
        self.name = settings.served_model_name
        self.settings = settings
        self._named_adapters = frozenset(adapter.name for adapter in settings.adapters)
        self.adapters = parts.adapters  # those that were added while the cluster runs
        self.adapter_operations = parts.adapter_operations
        self.lifecycle = Lifecycle(parts)
        self.requests = RequestHandler(parts)
        self.status = Status(parts)
        self._features = parts.features
        self.max_model_len = parts.max_model_len
        self.conversations = parts.conversations
        self.telemetry = parts.telemetry
        self.unreadable = parts.unreadable  # of all records, also those of the whole cluster
        self.audit = parts.audit
        self.canaries = parts.canaries
        self.live = _live(parts, self.status) if settings.ui else None  # None: the page is off
        self.recorder = parts.recorder  # None: the page is off

    def adapter(self, model: str | None, tenant: str = "") -> str | None:
        """Return the LoRA adapter that a client requests as `adapter` or as `model:adapter`.

        Args:
            model: the field `model` of the request; None: the request has no such field.
            tenant: the request's tenant; empty: the cluster has no API keys.

        Returns:
            The name of an adapter of --lora, or the key of an added adapter; empty for the base
            model; None if the name is neither this model's nor that of one of its adapters.
        """
        if model in (None, self.name):
            return ""
        name = model.removeprefix(f"{self.name}:")
        if name in self._named_adapters:
            return name
        added = self.adapters.find(name, tenant)
        return added.key if added else None

    def feature(self, kind: type[F]) -> F:
        """Return the side of a feature that is never off."""
        return next(side for side in self._features if isinstance(side, kind))

    async def look_for(self, model: str) -> None:
        """Read the added adapters in Redis again if this may be the name of a new one."""
        if self.settings.lora_root and len(model) <= MAX_NAME + len(self.name):
            await self.adapters.refresh_if_possible()


def _live(parts: Parts, status: Status) -> Live:
    view = View(
        parts.telemetry.recent,
        parts.settings,
        places=parts.telemetry.places,
        index=parts.index,
        fleet=parts.fleet,
        feed=parts.feed,
        states=parts.states.read,
        live=partial(live_states, parts.features),
        queue=status.queue,
        features=status.features,
        peers=parts.subscriber,
    )
    return Live(view.snapshot, draining)
