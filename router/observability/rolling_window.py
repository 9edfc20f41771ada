"""What happened in the last five minutes, in parts that are forgotten one after the other."""

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

WINDOW_S = 300.0  # seconds that are remembered
BUCKET_S = 5.0  # length of a part; the oldest part is forgotten as a whole

T = TypeVar("T")


class RollingWindow(Generic[T]):
    """The parts of the last WINDOW_S in which something happened.

    Args:
        clock: returns seconds.
        make: makes an empty part.
        on_drop: called with each part that has become too old.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        make: Callable[[], T],
        on_drop: Callable[[T], None] = lambda _: None,
    ) -> None:
        self._clock = clock
        self._make = make
        self._on_drop = on_drop
        self._parts: deque[tuple[int, T]] = deque()  # number and content, the oldest first

    def current(self) -> T:
        """Return the part for what happens now."""
        number = self._roll()
        if not self._parts or self._parts[-1][0] != number:
            self._parts.append((number, self._make()))
        return self._parts[-1][1]

    def parts(self) -> list[T]:
        """Return all parts, the oldest first."""
        self._roll()
        return [part for _, part in self._parts]

    def _roll(self) -> int:
        number = int(self._clock() // BUCKET_S)
        while self._parts and self._parts[0][0] <= number - WINDOW_S // BUCKET_S:
            self._on_drop(self._parts.popleft()[1])
        return number
