"""The live page's events: once a second, to whoever listens, what has changed since the last one.

A state is JSON by key. Each listener remembers the one that it was told, so that one who reads
slowly misses states and no change. States are made for listeners only, and one serves all of them.
"""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

import msgspec

from router.api.errors import ApiError

PERIOD_S = 1.0
FRESH_S = 0.5  # a state of this age will do
LISTENERS = 16  # each costs a message a second, which many replicas make long

State = Mapping[str, bytes]


class Live:
    """Tells listeners of the states that `look` returns, until they leave or `over` returns."""

    def __init__(
        self, look: Callable[[], Awaitable[State]], over: Callable[[], Awaitable[None]]
    ) -> None:
        self.listeners = 0
        self._look = look
        self._over = over
        self._looking = asyncio.Lock()
        self._state: State = {}
        self._made_s = -FRESH_S

    async def listen(self) -> AsyncIterator[bytes]:
        """Server-sent events: the whole state, then changes. ApiError where too many listen."""
        if self.listeners >= LISTENERS:
            raise ApiError(
                503,
                f"{LISTENERS} live pages are open at this router, the most that it serves; "
                "close one and try again",
                type="server_error",
            )
        events = self._events()
        return _chain(await anext(events), events)  # one that has begun will also end

    async def _events(self) -> AsyncIterator[bytes]:
        self.listeners += 1
        try:
            told: State = {}
            while True:
                state = await self._now()
                yield event(told, state)
                told = state
                if await self._is_over(within_s=PERIOD_S):
                    return
        finally:
            self.listeners -= 1

    async def _now(self) -> State:
        async with self._looking:
            if time.monotonic() - self._made_s > FRESH_S:
                self._state = await self._look()
                self._made_s = time.monotonic()
        return self._state

    async def _is_over(self, *, within_s: float) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                await self._over()
                return True
        return False


def event(told: State, state: State) -> bytes:
    """What one who was told the one has to know of the other; `whole` where that was nothing."""
    changed = {key: msgspec.Raw(value) for key, value in state.items() if told.get(key) != value}
    gone = list(told.keys() - state.keys())
    data = msgspec.json.encode({"changed": changed, "gone": gone})
    return b"event: %b\ndata: %b\n\n" % (b"change" if told else b"whole", data)


async def _chain(first: bytes, events: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for each in events:
        yield each
