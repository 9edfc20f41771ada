"""Waiting for conditions. Tests never wait for a fixed time."""

import asyncio
import time
from collections.abc import Callable


async def until(is_true: Callable[[], object], within_s: float = 60.0) -> None:
    """Wait until the condition is true. Raises TimeoutError after `within_s` seconds."""
    async with asyncio.timeout(within_s):
        while not is_true():
            await asyncio.sleep(0.01)


def wait_until(
    is_true: Callable[[], object], within_s: float = 120.0, *, every_s: float = 0.1
) -> None:
    """Wait until the condition is true, in a test that is not asynchronous."""
    deadline = time.monotonic() + within_s
    while not is_true():
        assert time.monotonic() < deadline, "the condition did not become true in time"
        time.sleep(every_s)
