"""The parts of one model's router that the HTTP routes use."""

import asyncio
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any, TypeVar

from kvroute.blocks.variants import MAX_NAME
from kvroute.features.own_methods import own_methods
from kvroute.features.router_feature import RouterFeature
from kvroute.router.api.calls import Call
from kvroute.router.serving.assembly import Parts
from kvroute.router.serving.request_handler import RequestHandler
from kvroute.router.serving.status import Status

F = TypeVar("F", bound=RouterFeature)
# The most seconds that a new router waits until its mirror, the copy of the index of cached blocks,
# is loaded.
LOADED_S = 5.0


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
        self._with_data = own_methods(self.features, RouterFeature.with_data)
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

    def with_data(self, call: Call, kept: ExitStack) -> Call:
        """Return the call with the data of features for the replicas.

        Args:
            kept: closed when the call has ended.
        """
        for each in self._with_data:
            call = kept.enter_context(each(call))
        return call


class Lifecycle:
    """Starts and ends the background tasks of a model's parts."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all tasks, and wait up to LOADED_S until the mirror is loaded.

        Before that, the router does not know which replicas have a prompt cached.
        """
        parts = self._parts
        await parts.telemetry.start(
            parts.index,
            parts.base.surroundings.address,
            fleet=parts.fleet,
            feed=parts.feed,
            unreadable=parts.unreadable,
            links=parts.links,
            blamed=parts.blamed,
            queue=parts.queue,
        )
        coroutines = self.coroutines() | parts.telemetry.tasks()
        self._tasks = [asyncio.create_task(task, name=name) for name, task in coroutines.items()]
        await parts.feed.wait_until_loaded(timeout_s=LOADED_S)

    def check(self) -> None:
        """Raise the error of a task that has ended. No task should end by itself."""
        for task in self._tasks:
            if task.done():
                task.result()

    async def close(self) -> None:
        """End the tasks, and remove this cluster from the list that other clusters read."""
        for task in self._tasks:
            task.cancel()
        self._parts.tokenizer.close()
        await self._parts.neighbours.leave()
        await self._parts.telemetry.close()

    def coroutines(self) -> dict[str, Coroutine[Any, Any, None]]:
        """Return the background tasks of the parts, by name."""
        parts = self._parts
        coroutines = {
            "feed": parts.feed.run(),
            "peer publisher": parts.publisher.run(parts.index, parts.subscriber),
            "peer subscriber": parts.subscriber.run(parts.index),
            "links": parts.links.run(),
            "liveness": parts.liveness.run(),
            "holding": parts.holding.run(),
            "unstarted": parts.dispatcher.unstarted.run(),
            "neighbours": parts.neighbours.run(),
        }
        for room in parts.rooms:
            coroutines[f"waiting room: {room.line.reason}"] = room.run()
        for side in parts.features:
            coroutines |= side.tasks()
        return coroutines
