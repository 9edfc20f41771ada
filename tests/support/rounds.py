"""Counts the rounds of an event loop, to show that other tasks run between two pieces of work."""

import asyncio
from collections import Counter
from collections.abc import Iterable


class Rounds:
    """Counts rounds of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._next()

    def _next(self) -> None:
        self.count += 1
        self._loop.call_soon(self._next)


def most_in_a_round(rounds: Iterable[int]) -> int:
    """Return how many of the events, each given by its round, fell into the same round."""
    return max(Counter(rounds).values())
