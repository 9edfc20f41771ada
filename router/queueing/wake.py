"""An event that is set when a replica may be able to take a further request."""

import asyncio
import contextlib

from kvroute.router.placement.attempts import Attempt, RequestObserver


class Wake(RequestObserver):
    """An event that is set at the first token and at the end of each request."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def set(self) -> None:
        """Set the event, which wakes the task in `wait`."""
        self._event.set()

    def first_token(self, attempt: Attempt) -> None:
        self._event.set()

    def ended(self, attempt: Attempt) -> None:
        self._event.set()

    async def wait(self, within_s: float) -> None:
        """Wait until the event is set, for `within_s` seconds at most; then clear it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._event.wait()
        self._event.clear()
