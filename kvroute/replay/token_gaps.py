"""The times between two tokens of the answers in a replay."""

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

RESOLUTION = 1.01  # values that differ by less than this factor are counted as equal
STEP = math.log(RESOLUTION)


@dataclass
class TokenGaps:
    """Counts the times between two tokens of an answer, over all answers."""

    # Rounded logarithm of a time -> how often it occurred.
    _counts: Counter[int] = field(default_factory=Counter)

    def __bool__(self) -> bool:
        """Return whether a time was counted."""
        return bool(self._counts)

    def add(self, seconds: float, count: int = 1) -> None:
        """Count a time that lies between the tokens of `count` answers."""
        if count and seconds > 0.0:
            self._counts[round(math.log(seconds) / STEP)] += count

    def update(self, other: "TokenGaps") -> None:
        """Add the counts of another replica."""
        self._counts.update(other._counts)

    def percentiles_s(self, *shares: float) -> list[float]:
        """Return the time that this share of all times does not exceed, for each share.

        At least one time must have been counted.
        """
        numbers = sorted(self._counts)
        up_to = [*accumulate(self._counts[number] for number in numbers)]
        places = (bisect_left(up_to, share * up_to[-1]) for share in shares)
        return [math.exp(numbers[place] * STEP) for place in places]
