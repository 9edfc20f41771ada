"""All models that one router serves, and the choice of the model for a request."""

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request

from kvroute.blocks.variants import name_of
from kvroute.contract.adapters import Adapter
from kvroute.features.gate import ANYONE, Caller
from kvroute.router.api.errors import ApiError, invalid
from kvroute.router.serving.diagnosis import Diagnosis
from kvroute.router.serving.model_router import ModelRouter
from kvroute.store.connection import connect

# The field `permission` of every model. Clients of OpenAI's older API read it.
PERMISSION = {
    "id": "modelperm-kvroute",
    "object": "model_permission",
    **dict.fromkeys(("allow_sampling", "allow_logprobs", "allow_view"), True),
    **dict.fromkeys(("allow_create_engine", "allow_search_indices", "allow_fine_tuning"), False),
    "organization": "*",
    "group": None,
    "is_blocking": False,
}

MAX_NAMES = 10  # in an error, the most names of models and adapters
MAX_SHOWN = 80  # in an error, the most characters that are shown of an unknown model's name


class Models:
    """One router's models, in the order of its settings."""

    def __init__(self, router_id: str, models: Sequence[ModelRouter]) -> None:
        self.router_id = router_id
        self.all = models
        self.first = models[0]
        self.settings = self.first.settings  # for settings that are equal for all models
        self.diagnosis = Diagnosis(
            connect(self.settings.redis_url),
            [model.status for model in models],
            self.first.base.surroundings,
            own_redis=self.settings.own_redis,
        )
        self._started = int(time.time())

    @property
    def only(self) -> str | None:
        """Return the name of the model if there is only one."""
        return self.first.name if len(self.all) == 1 else None

    async def find(self, model: str | None, caller: Caller) -> ModelRouter:
        """Return the same as `select`, and let features look for a variant of an unknown name."""
        tenant = caller.tenant
        if model is not None and all(each.variant(model, tenant) is None for each in self.all):
            for each in self.all:
                await each.look_for(model)
        return self.select(model, caller)

    def select(self, model: str | None, caller: Caller = ANYONE) -> ModelRouter:
        """Return the router of a model.

        Args:
            model: the field `model` of a request: the name of a model or of an adapter. None: the
                request has no such field, which is allowed if there is only one model.
            caller: the sender of the request.

        Raises:
            ApiError: the model is not served, or the caller may not use it.
        """
        if model is None and len(self.all) == 1:
            return self.first
        if model is None:
            served = self._served(caller)
            raise invalid("model", f"model is missing; this server has {served}")
        for candidate in self.all:
            variant = candidate.variant(model, caller.tenant)
            if variant is not None and (not variant or caller.may_use(name_of(variant))):
                return candidate
        name = model if len(model) <= MAX_SHOWN else model[:MAX_SHOWN] + "…"
        raise ApiError(
            404,
            f"The model '{name}' does not exist; this server has {self._served(caller)}.",
            param="model",
            code="model_not_found",
        )

    def _served(self, caller: Caller) -> str:
        """Return the names of the models and adapters that the caller may use, as a text."""
        names = [card["id"] for model in self.all for card in self.cards(model, caller)]
        more = f" and {len(names) - MAX_NAMES:,} more" if len(names) > MAX_NAMES else ""
        return " and ".join(map(repr, names[:MAX_NAMES])) + more

    def cards(self, model: ModelRouter, caller: Caller) -> list[dict[str, Any]]:
        """Return a model and its adapters that the caller may use, as OpenAI's API lists them."""
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
        variants = [_adapter(adapter) for adapter in model.settings.adapters]
        variants += [variant for cards in model.cards for variant in cards(caller.tenant)]
        usable = [variant for variant in variants if caller.may_use(variant["id"])]
        return [card, *({**card, **variant, "parent": model.name} for variant in usable)]


def label_by_model(
    models: Iterable[ModelRouter], results: Iterable[Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the models' results as one list, and add the field `model` to each entry."""
    pairs = zip(models, results, strict=True)
    return [{**entry, "model": model.name} for model, entries in pairs for entry in entries]


async def _served(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Served = Annotated[Models, Depends(_served)]  # a route's parameter of this type gets the models


def _adapter(adapter: Adapter) -> Mapping[str, Any]:
    """Return the fields of an adapter's card that differ from the card of its model."""
    return {"id": adapter.name, "root": adapter.path}
