"""Work that comes together begins one by one."""

import asyncio


class Turns:
    """One turn for each who waits, in order; between two, the event loop does what else is due."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def next(self) -> None:
        """Returns when it is the caller's turn."""
        async with self._turn:
            await asyncio.sleep(0)
