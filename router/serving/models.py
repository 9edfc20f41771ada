"""All models that one router serves, and the choice of the model for a request."""

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request

from kvroute.contract.adapters import Adapter
from kvroute.keys.limits import TenantLimits
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.serving.diagnosis import Diagnosis
from kvroute.router.serving.model_router import ModelRouter
from kvroute.store.connection import connect

# Of every model; clients of OpenAI's older API read it.
PERMISSION = {
    "id": "modelperm-kvroute",
    "object": "model_permission",
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
    "organization": "*",
    "group": None,
    "is_blocking": False,
}

MAX_SHOWN = 80  # characters of a model's name that is not served


class Models:
    """One router's models, in the order of its settings."""

    def __init__(self, router_id: str, models: Sequence[ModelRouter]) -> None:
        self.router_id = router_id
        self.all = models
        self.first = models[0]
        self.settings = self.first.settings  # only those that all models share are used
        self.diagnosis = Diagnosis(
            connect(self.settings.redis_url), [model.status for model in models]
        )
        self._started = int(time.time())

    @property
    def only(self) -> str | None:
        """Return the name of the model if there is only one."""
        return self.first.name if len(self.all) == 1 else None

    def named(self, model: str | None, limits: TenantLimits | None = None) -> ModelRouter:
        """Return the router of the model that a request names, or whose adapter it names.

        With only one model the name is optional.

        Raises:
            ApiError: the model is not served, or not to a tenant with these limits.
        """
        if model is None and len(self.all) == 1:
            return self.first
        if model is None:
            raise invalid("model", f"model is missing; this server has {self._served(limits)}")
        for each in self.all:
            adapter = each.adapter(model)
            if adapter is not None and _may_name(adapter, limits):
                return each
        name = model if len(model) <= MAX_SHOWN else model[:MAX_SHOWN] + "…"
        raise ApiError(
            404,
            f"The model '{name}' does not exist; this server has {self._served(limits)}.",
            param="model",
            code="model_not_found",
        )

    def _served(self, limits: TenantLimits | None) -> str:
        names = [card["id"] for each in self.all for card in self.cards(each, limits)]
        return " and ".join(map(repr, names))

    def cards(self, model: ModelRouter, limits: TenantLimits | None = None) -> list[dict[str, Any]]:
        """Return a model and those of its adapters that the limits allow, in OpenAI's shape."""
        card = {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "kvroute",
            "root": model.settings.model,
            "parent": None,
            "max_model_len": model.status.max_model_len,
            "permission": [PERMISSION | {"created": self._started}],
        }
        adapters = [
            adapter for adapter in model.settings.adapters if _may_name(adapter.name, limits)
        ]
        return [card, *(card | _adapter(adapter, parent=model.name) for adapter in adapters)]


def _may_name(adapter: str, limits: TenantLimits | None) -> bool:
    """Empty: the model itself."""
    return not adapter or limits is None or limits.allows(adapter)


def together(
    models: Iterable[ModelRouter], results: Iterable[Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the models' results as one list; each entry names its model."""
    pairs = zip(models, results, strict=True)
    return [{**entry, "model": model.name} for model, entries in pairs for entry in entries]


async def _served(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Served = Annotated[Models, Depends(_served)]  # a route's parameter


def _adapter(adapter: Adapter, *, parent: str) -> dict[str, Any]:
    """Return the members of an adapter's card that differ from the model's."""
    return {"id": adapter.name, "root": adapter.path, "parent": parent}
