"""An event that says when replicas may have room again."""

import asyncio
import contextlib

from kvroute.router.placement.attempts import Attempt, RequestObserver


class Wake(RequestObserver):
    """Rings at each first token and at each end of a request."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def ring(self) -> None:
        """Wake the task that waits for the next ring."""
        self._event.set()

    def first_token(self, attempt: Attempt) -> None:
        self._event.set()

    def ended(self, attempt: Attempt) -> None:
        self._event.set()

    async def next(self, within_s: float) -> None:
        """Return after the next ring, or after `within_s`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._event.wait()
        self._event.clear()
