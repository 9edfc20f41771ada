"""Work that comes together begins one by one."""

import asyncio
import time

CROWD_ROUNDS, CROWD_S = 16, 0.002  # between two of a crowd, whichever is over first


class Turns:
    """One turn for each who waits, in order; between two, the event loop does what else is due."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self, *, is_crowd: bool = False) -> None:
        """Returns when it is the caller's turn. A crowd leaves the loop more rounds between two: it
        accepts one connection in each, and who asks for health may be behind all of the crowd."""
        async with self._turn:
            await asyncio.sleep(0)
            if is_crowd:
                await _rounds()


async def _rounds() -> None:
    end_s = time.monotonic() + CROWD_S
    for _ in range(CROWD_ROUNDS):
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(0)
