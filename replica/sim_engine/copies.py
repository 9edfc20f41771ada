"""Copies over one link: one at a time, in the order in which they were asked for."""

import math
from collections import deque
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Copies(Generic[T]):
    """Those that have not ended, and what waits for each. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._under_way = deque[tuple[float, T]]()
        self._free_s = -math.inf  # when the link has nothing to do

    def __len__(self) -> int:
        return len(self._under_way)

    def __iter__(self) -> Iterator[T]:
        return (what for _, what in self._under_way)

    @property
    def next_end_s(self) -> float:
        """When the first one ends; infinite: there is none."""
        return self._under_way[0][0] if self._under_way else math.inf

    def begin(self, what: T, copy_s: float, now_s: float) -> float:
        """It begins when those before have ended; returns when it ends."""
        self._free_s = max(self._free_s, now_s) + copy_s
        self._under_way.append((self._free_s, what))
        return self._free_s

    def pop(self) -> T:
        """The first one has ended."""
        return self._under_way.popleft()[1]

    def drop(self, what: T) -> None:
        """Nothing waits for it any longer. It takes its time all the same."""
        self._under_way = deque(each for each in self._under_way if each[1] is not what)
