"""Models copies over one link: one copy at a time, in the order of the requests."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Copies(Generic[T]):
    """The pending copies, each with the object that waits for it.

    Times are seconds of any one clock.
    """

    def __init__(self) -> None:
        self._pending = deque[tuple[float, T]]()  # time of a copy's end, and its waiter
        self._free_s = -math.inf  # time at which the last copy ends

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[T]:
        return (waiter for _, waiter in self._pending)

    @property
    def next_end_s(self) -> float:
        """Return the time at which the first copy ends; infinite if there is none."""
        return self._pending[0][0] if self._pending else math.inf

    def begin(self, waiter: T, copy_s: float, now_s: float) -> float:
        """Add a copy, which begins after all earlier copies; return the time of its end."""
        self._free_s = max(self._free_s, now_s) + copy_s
        self._pending.append((self._free_s, waiter))
        return self._free_s

    def pop(self) -> T:
        """Remove the first copy, which has ended, and return its waiter."""
        return self._pending.popleft()[1]

    def drop(self, waiter: T) -> None:
        """Remove a waiter. Its copy still takes its time on the link."""
        self._pending = deque(copy for copy in self._pending if copy[1] is not waiter)
