"""Models the times of copies over one link, which makes them one after the other."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Copies(Generic[T]):
    """The pending copies. Each copy has a waiter: the object that waits for it.

    The caller passes all times, in seconds of the same clock.
    """

    def __init__(self) -> None:
        self._pending = deque[tuple[float, T]]()  # for each copy: time of its end, and its waiter
        self._free_s = -math.inf  # time at which the last copy ends

    def __len__(self) -> int:
        return len(self._pending)

    def __iter__(self) -> Iterator[T]:
        return (waiter for _, waiter in self._pending)

    @property
    def next_end_s(self) -> float:
        """Return the time at which the first pending copy ends, or infinity if there is none."""
        return self._pending[0][0] if self._pending else math.inf

    def begin(self, waiter: T, copy_s: float, now_s: float) -> float:
        """Add a copy that starts after all earlier copies and takes `copy_s`; return its end."""
        self._free_s = max(self._free_s, now_s) + copy_s
        self._pending.append((self._free_s, waiter))
        return self._free_s

    def pop(self) -> T:
        """Remove the first copy, which has ended, and return its waiter."""
        return self._pending.popleft()[1]

    def drop(self, waiter: T) -> None:
        """Remove a waiter. Its copy is still made, and later copies wait for it."""
        self._pending = deque(copy for copy in self._pending if copy[1] is not waiter)
