"""Starts and ends the background tasks of one model in one router."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from kvroute.router.serving.assembly import Parts

# The most seconds that a new router waits until its mirror, the copy of the index of cached blocks,
# is loaded.
LOADED_S = 5.0


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
