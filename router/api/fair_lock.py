"""Does the work for many requests one by one, so that other tasks run between two of them."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")

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


async def one_by_one(items: Iterable[Item]) -> AsyncIterator[Item]:
    """Yield the items. The event loop runs other tasks between two of them."""
    for number, item in enumerate(items):
        if number:
            await asyncio.sleep(0)
        yield item


async def run_all(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Run coroutines at the same time, and return their results in order.

    They start one by one. If one of them raises an error, or the caller is cancelled, the others
    are cancelled one by one. So neither delays other tasks, however many there are.

    Args:
        coroutines: each is created when it starts.
    """
    tasks: list[asyncio.Task[Result]] = []
    try:
        async for coroutine in one_by_one(coroutines):
            tasks.append(asyncio.create_task(coroutine))
        if not tasks:
            return []
        # Unlike gather, wait does not cancel all tasks at once when it is cancelled.
        ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in ended:
            task.result()
        return [task.result() for task in tasks]
    finally:
        await cancel_all(tasks)


async def cancel_all(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel the tasks that have not ended, one by one, and wait until they have ended."""
    unfinished = deque(task for task in tasks if not task.done())
    try:
        while unfinished:
            unfinished.popleft().cancel()
            await asyncio.sleep(0)
    finally:  # the caller was cancelled once more
        for task in unfinished:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _let_others_run() -> None:
    end_s = time.monotonic() + CROWD_S
    for _ in range(CROWD_ROUNDS):
        if time.monotonic() > end_s:
            return
        await asyncio.sleep(0)
