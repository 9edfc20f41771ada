"""Sends each open live page, once a second, the changes since its last event.

A state is a set of JSON values by key. The router keeps the last state that it sent to each
listener, so a listener that reads slowly skips states but does not miss a change. States are made
only while there are listeners, and all listeners share them.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from kvroute.router.api.errors import ApiError

PERIOD_S = 1.0  # time between two events of a page
FRESH_S = 0.5  # a state up to this age is also sent to other listeners
LISTENERS = 16  # the most open pages; with many replicas, their events are long

State = Mapping[str, bytes]


class Live:
    """Sends states to listeners until they disconnect or the router stops.

    Args:
        snapshot: returns the current state.
        over: waits until the router stops.
    """

    def __init__(
        self, snapshot: Callable[[], Awaitable[State]], over: Callable[[], Awaitable[None]]
    ) -> None:
        self.listeners = 0
        self._snapshot = snapshot
        self._over = over
        self._making = asyncio.Lock()
        self._state: State = {}
        self._made_s = -FRESH_S

    async def listen(self, more: Callable[[], State] = dict) -> AsyncIterator[bytes]:
        """Return server-sent events: the whole state first, then changes.

        Args:
            more: returns values that only this listener gets, such as the samples of one replica.

        Raises:
            ApiError: too many pages are open.
        """
        if self.listeners >= LISTENERS:
            raise ApiError(
                503,
                f"{LISTENERS} live pages are open at this router, which is the limit; close one "
                "and try again",
            )
        events = self._events(more)
        # A generator runs its `finally` only if it was started, so its first event is made here.
        return _chain(await anext(events), events)

    async def _events(self, more: Callable[[], State]) -> AsyncIterator[bytes]:
        self.listeners += 1
        try:
            sent: State = {}
            while True:
                state = {**await self._current(), **more()}
                yield event(sent, state)
                sent = state
                if await self._is_over(within_s=PERIOD_S):
                    return
        finally:
            self.listeners -= 1

    async def _current(self) -> State:
        async with self._making:
            if time.monotonic() - self._made_s > FRESH_S:
                self._state = await self._snapshot()
                self._made_s = time.monotonic()
        return self._state

    async def _is_over(self, *, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._over()
                return True
        return False


def event(sent: State, state: State) -> bytes:
    """Return an event with the changes from `sent` to `state`, or the whole state if none was sent.

    An empty `sent` means that the listener has not received a state yet.
    """
    changed = {key: msgspec.Raw(value) for key, value in state.items() if sent.get(key) != value}
    gone = list(sent.keys() - state.keys())
    data = msgspec.json.encode({"changed": changed, "gone": gone})
    return b"event: %b\ndata: %b\n\n" % (b"change" if sent else b"whole", data)


async def _chain(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for later in events:
        yield later
