"""Starts requests that arrive together one by one, so that other tasks run between them."""

import asyncio
import time

# While many requests arrive, the event loop runs other tasks between two requests: for this many
# rounds, but for no longer than this many seconds.
CROWD_ROUNDS, CROWD_S = 16, 0.002


class FairLock:
    """Starts waiting requests in order. The event loop runs other tasks between two of them."""

    def __init__(self) -> None:
        self._lock = asyncio.Lock()

    async def wait(self, *, is_crowd: bool = False) -> None:
        """Wait until the requests before this one have started.

        Args:
            is_crowd: whether many requests arrive. Then the event loop runs several rounds between
                two of them. It accepts one connection in each round; otherwise, a health check
                that connects after all of them would be answered late.
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
