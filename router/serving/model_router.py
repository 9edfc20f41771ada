"""The parts of one model's router that the HTTP routes use."""

from contextlib import ExitStack
from typing import TypeVar

from kvroute.blocks.variants import MAX_NAME
from kvroute.features.own_methods import own_methods
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.lifecycle import Lifecycle
from kvroute.router.serving.request_handler import RequestHandler
from kvroute.router.serving.status import Status

F = TypeVar("F", bound=RouterFeature)


class ModelRouter:
    """Everything that the HTTP routes need for one model. `lifecycle` starts and ends its tasks."""

    def __init__(self, parts: Parts) -> None:
        settings = parts.settings
        self.base = parts.base
        self.name = settings.served_model_name
        self.settings = settings
        self._named_adapters = frozenset(adapter.name for adapter in settings.adapters)
        self.features = parts.features
        self._variants = own_methods(self.features, RouterFeature.variant)
        self._look_for = own_methods(self.features, RouterFeature.look_for)
        self.cards = own_methods(self.features, RouterFeature.cards)
        self.promises = own_methods(self.features, RouterFeature.promises)
        self._entered = own_methods(self.features, RouterFeature.entered)
        self.extending = parts.extending
        self.lifecycle = Lifecycle(parts)
        self.requests = RequestHandler(parts)
        self.status = Status(parts)
        self.max_model_len = parts.max_model_len
        self.telemetry = parts.telemetry
        self.unreadable = parts.unreadable  # of all records, also those of the whole cluster

    def variant(self, model: str | None, tenant: str = "") -> str | None:
        """Return the variant that a client requests as `variant` or as `model:variant`.

        Args:
            model: the field `model` of the request; None: the request has no such field.
            tenant: the caller's tenant; empty: there are no tenants.

        Returns:
            The name of an adapter of --lora, or the variant of a feature; empty for the base model;
            None if the name is neither this model's nor that of one of its variants.
        """
        if model in (None, self.name):
            return ""
        name = model.removeprefix(f"{self.name}:")
        if name in self._named_adapters:
            return name
        variants = (variant(name, tenant) for variant in self._variants)
        return next((variant for variant in variants if variant is not None), None)

    def feature(self, kind: type[F]) -> F:
        """Return the side of a feature that is never off."""
        return next(side for side in self.features if isinstance(side, kind))

    async def look_for(self, model: str) -> None:
        """Let features look for the variant of a name, unless it is longer than any name."""
        if len(model) <= len(f"{self.name}:") + MAX_NAME:
            for look_for in self._look_for:
                await look_for(model.removeprefix(f"{self.name}:"))

    def entered(self, call: Call, kept: ExitStack) -> Call:
        """Return the call with the data of features for the replicas.

        Args:
            kept: closed when the call has ended.
        """
        for entered in self._entered:
            call = kept.enter_context(entered(call))
        return call
