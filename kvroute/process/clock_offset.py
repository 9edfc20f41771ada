"""How far two clocks are apart, from a reading between a request and its response."""

from typing import NamedTuple

AGREED_S = 1.0  # two clocks agree unless they certainly differ by more than this many seconds


class Offset(NamedTuple):
    """The lower and the upper bound of how many seconds one clock is ahead of another."""

    low_s: float
    high_s: float

    @property
    def min_difference_s(self) -> float:
        """Return the smallest possible difference; it is negative if the clock is behind."""
        return max(self.low_s, 0.0) + min(self.high_s, 0.0)

    def relative_to(self, other: "Offset") -> "Offset":
        """Return the offset to another clock; both offsets must refer to the same third clock."""
        return Offset(self.low_s - other.high_s, self.high_s - other.low_s)


def offset(
    clock_s: float, *, sent_s: float, received_s: float, resolution_s: float = 0.0
) -> Offset:
    """Return the offset of a clock that was read between a request and its response.

    Args:
        clock_s: The time that the clock showed, rounded down to `resolution_s`.
        sent_s: Time of the request on this computer's clock.
        received_s: Time of the response on this computer's clock.
        resolution_s: Resolution of `clock_s`.
    """
    return Offset(clock_s - received_s, clock_s + resolution_s - sent_s)
