"""Tests wait for what must become true, never for a time."""

import asyncio
import time
from collections.abc import Callable


async def until(is_true: Callable[[], object], within_s: float = 60.0) -> None:
    async with asyncio.timeout(within_s):
        while not is_true():
            await asyncio.sleep(0.01)


def wait_until(is_true: Callable[[], object], within_s: float = 120.0) -> None:
    """The same for tests that block."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.1)
