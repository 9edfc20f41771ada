"""All models that a router serves, which of them a request means, and how a route gets at them."""

import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

from fastapi import Depends, Request

from replica.adapters import Adapter
from replica.kvindex.index import connect
from router.api.errors import ApiError, invalid
from router.insight.diagnosis import Diagnosis
from router.parts import Parts


class Models:
    """One router's, in the order in which they were given."""

    def __init__(self, router_id: str, models: Sequence[Parts]) -> None:
        self.router_id = router_id
        self.all = models
        self.first = models[0]
        self.settings = self.first.settings  # of it, what all models have in common
        self.diagnosis = Diagnosis(connect(self.settings.redis_url), models)
        self._started = int(time.time())

    @property
    def only(self) -> str | None:
        """The name of the one model, where there are not several."""
        return self.first.model if len(self.all) == 1 else None

    def named(self, model: str | None) -> Parts:
        """Those of the model that a request names, or whose adapter it names. It may leave the name
        out where there is one model only. ApiError for one that is not served."""
        if model is None and len(self.all) == 1:
            return self.first
        if model is None:
            raise invalid("model", f"model is missing; this server has {self._served()}")
        for parts in self.all:
            if parts.lora(model) is not None:
                return parts
        raise ApiError(
            404,
            f"The model '{model}' does not exist; this server has {self._served()}.",
            param="model",
            code="model_not_found",
        )

    def _served(self) -> str:
        names = [name for parts in self.all for name in (parts.model, *parts.adapters)]
        return " and ".join(map(repr, names))

    def cards(self, parts: Parts) -> list[dict[str, Any]]:
        """A model, and its adapters, in OpenAI's shape."""
        card = {
            "id": parts.model,
            "object": "model",
            "created": self._started,
            "owned_by": "kvroute",
            "max_model_len": parts.fleet.max_model_len,
        }
        adapters = parts.adapters.values()
        return [card, *(card | _adapter(each, parent=parts.model) for each in adapters)]


def together(
    models: Iterable[Parts], answers: Iterable[Iterable[dict[str, Any]]]
) -> list[dict[str, Any]]:
    """The models' answers as one list, each entry with the model that it belongs to."""
    pairs = zip(models, answers, strict=True)
    return [{**entry, "model": parts.model} for parts, answer in pairs for entry in answer]


async def _served(request: Request) -> Models:
    models: Models = request.app.state.models
    return models


Served = Annotated[Models, Depends(_served)]  # a route's parameter


def _adapter(adapter: Adapter, *, parent: str) -> dict[str, Any]:
    """What its card has besides the model's."""
    return {"id": adapter.name, "root": adapter.path, "parent": parent}
