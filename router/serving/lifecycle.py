"""The background tasks of one model's router, from its start to its end."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvroute.router.serving.assembly import Parts

LOADED_S = 5.0  # most seconds that a new router waits until its mirror is loaded


class Lifecycle:
    """Starts and ends the background tasks of a model's parts."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start all tasks, and wait up to LOADED_S for the mirror.

        Without a loaded mirror, prompts are sent to replicas that do not have them cached.
        """
        parts = self._parts
        await parts.telemetry.start(
            parts.index,
            fleet=parts.fleet,
            feed=parts.feed,
            catalogue=parts.prefixes.catalogue,
            audit=parts.audit,
            unreadable=parts.unreadable,
            links=parts.links,
            blamed=parts.blamed,
            responses=parts.responses,
            queue=parts.queue,
            seats=parts.seats,
        )
        works = self._works() | parts.prefixes.tasks() | parts.telemetry.tasks()
        self._tasks = [asyncio.create_task(work, name=name) for name, work in works.items()]
        await parts.feed.wait_until_loaded(timeout_s=LOADED_S)

    def check(self) -> None:
        """Raise the error of a task that has ended: no task should end by itself."""
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

    def _works(self) -> dict[str, Coroutine[Any, Any, None]]:
        parts = self._parts
        works = {
            "feed": parts.feed.run(),
            "peer publisher": parts.publisher.run(parts.index, parts.subscriber),
            "peer subscriber": parts.subscriber.run(parts.index),
            "links": parts.links.run(),
            "liveness": parts.liveness.run(),
            "holding": parts.holding.run(),
            "neighbours": parts.neighbours.run(),
            "ended sessions": parts.ended_sessions.run(parts.links),
        }
        if parts.seating is not None:
            works["seating"] = parts.seating.run()
        return works
