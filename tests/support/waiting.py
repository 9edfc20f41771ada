"""Tests wait for what must become true, never for a time."""

import asyncio
from collections.abc import Callable


async def until(is_true: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_true():
            await asyncio.sleep(0.01)
