"""What a feature does once in a router, for all of its models. Each method has an empty default."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvroute.features.figure import Figure
from kvroute.features.own_methods import overriding

if TYPE_CHECKING:
    from starlette.types import ASGIApp

    from kvroute.process.exposition import Readings


class RouterService:
    """What one feature has once in a router. It may import the core, and no other feature."""

    name = ""  # the name of its folder, which is the key of its facts
    running: "Sequence[asyncio.Task[None]]" = ()  # its tasks, none of which ends by itself

    # Its life, in this order.

    def attach(self, application: "ASGIApp") -> None:
        """Keep the router's HTTP application, if the service sends requests to it."""

    def metrics(self, readings: "Readings") -> None:
        """Export its metrics; called once, unless metrics are off."""

    def start(self) -> None:
        """Start its tasks. All models can take requests now."""

    def check(self) -> None:
        """Raise the error of a task that has ended. Ray Serve then replaces the router."""
        for task in self.running:
            if task.done() and not task.cancelled():
                task.result()

    async def stop(self) -> None:
        """End what other routers can go on with. This can be called more than once."""

    def close(self) -> None:
        """Release what it holds, when the process ends."""

    # What operators see.

    async def facts(self) -> Mapping[str, Any]:
        """Return its state as JSON, for `Feature.checks` of the doctor."""
        return {}

    def figures(self) -> Sequence[Figure]:
        """Return figures for those who watch the router; none if it does nothing now."""
        return ()


class RouterServices:
    """The services of one router, in the order of kvroute/features/__init__.py."""

    def __init__(self, services: Iterable[RouterService] = ()) -> None:
        services = tuple(services)
        self._all = services
        self._by_name = {service.name: service for service in services}
        self._factual = overriding(services, RouterService.facts)
        self._figures = overriding(services, RouterService.figures)

    def get(self, name: str) -> RouterService | None:
        """Return the service of a feature; None: it is off."""
        return self._by_name.get(name)

    def attach(self, application: "ASGIApp") -> None:
        """Give the services the router's HTTP application."""
        for service in self._all:
            service.attach(application)

    def start(self, readings: "Readings | None") -> None:
        """Start the services.

        Args:
            readings: gets their metrics; None: metrics are off.
        """
        for service in self._all:
            if readings is not None:
                service.metrics(readings)
            service.start()

    def check(self) -> None:
        """Raise the error of a task that has ended."""
        for service in self._all:
            service.check()

    async def stop(self) -> None:
        """End what other routers can go on with."""
        await asyncio.gather(*(service.stop() for service in self._all))

    def close(self) -> None:
        """Release what the services hold."""
        for service in self._all:
            service.close()

    async def facts(self) -> dict[str, Mapping[str, Any]]:
        """Return the facts for the doctor, by the name of the feature."""
        found = await asyncio.gather(*(service.facts() for service in self._factual))
        names = (service.name for service in self._factual)
        return dict(zip(names, found, strict=True))

    def figures(self) -> list[Figure]:
        """Return the figures of all services."""
        return [figure for service in self._figures for figure in service.figures()]
