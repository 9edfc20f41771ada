"""The pause of a replica's engines, in which they load other weights.

All of an answer comes from the same weights. So the pause begins when all running requests have
ended, and requests that arrive later wait for its end. But the rest of an answer that these weights
have begun may still run before the pause.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.replica.engine.protocol import Engine


class Pause:
    """The pause of all ranks of a replica."""

    def __init__(self) -> None:
        self._reason = ""  # why the engines will pause or do so; empty: they run requests
        self._is_paused = False
        self._running = 0  # requests and other calls that use the weights
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._is_near = asyncio.Event()  # the replica lets its last requests end, or pauses
        self._is_over = asyncio.Event()
        self._is_over.set()

    @property
    def is_near(self) -> bool:
        """Return whether the replica lets its last requests end, or pauses."""
        return self._is_near.is_set()

    @asynccontextmanager
    async def outside(self, *, is_continued: bool = False) -> AsyncIterator[None]:
        """Wait until there is no pause, and allow none while the block runs.

        Args:
            is_continued: Whether the block is the rest of an answer. It does not wait for the end
                of a pause that has not begun.
        """
        while not self._is_over.is_set() and (self._is_paused or not is_continued):
            await self._is_over.wait()
        self._running += 1
        self._is_idle.clear()
        try:
            yield
        finally:
            self._running -= 1
            if not self._running:
                self._is_idle.set()

    @asynccontextmanager
    async def begin(self, reason: str) -> AsyncIterator[None]:
        """Wait until all requests have ended, and let no new ones begin while the block runs.

        After an error, the pause goes on, since the engines cannot be used any more.
        """
        self._reason = reason
        self._is_near.set()
        self._is_over.clear()
        try:
            while self._running:
                await self._is_idle.wait()
        except asyncio.CancelledError:
            self._end()
            raise
        self._is_paused = True
        yield
        self._end()

    def _end(self) -> None:
        self._is_paused = False
        self._is_near.clear()
        self._is_over.set()

    async def wait_until_away(self, engine: Engine) -> str:
        """Wait until the engine is away or will pause; return the reason."""
        waits = [
            asyncio.ensure_future(engine.wait_until_away()),
            asyncio.ensure_future(self._is_near.wait()),
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            return str(waits[0].result()) if waits[0].done() else self._reason
        finally:
            for wait in waits:
                wait.cancel()

    async def wait_until_back(self, engine: Engine) -> None:
        """Wait until the engine can run requests again."""
        await engine.wait_until_back()
        await self._is_over.wait()
