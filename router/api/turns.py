"""Lets requests that arrive together start one by one, so that other tasks run between them."""

import asyncio
import time

# In a crowd, the event loop runs this many rounds, or for this long, between two requests.
CROWD_ROUNDS, CROWD_S = 16, 0.002


class Turns:
    """Waiting requests start in order; the event loop runs other callbacks between two of them."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def next(self, *, is_crowd: bool = False) -> None:
        """Return when the requests before this one have started.

        Args:
            is_crowd: True gives the event loop more rounds between two requests. The loop accepts
                one connection in each round, and a health check may be the last to connect.
        """
        async with self._lock:
            await asyncio.sleep(0)
            if is_crowd:
                await _let_others_run()


async def _let_others_run() -> None:
    end_s = time.monotonic() + CROWD_S
    for _ in range(CROWD_ROUNDS):
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(0)
