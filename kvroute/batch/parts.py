"""A batch's lines, divided among replicas: each gets neighbours, and idle ones help others.

The order of a batch makes lines with equal beginnings neighbours (order.py). A part is a contiguous
range of the order. A sender takes lines from the front of each part, so that each replica works in
a region of its own. If a part is used up, it takes over the rear half of the largest part.
"""

from collections.abc import Sequence

# A cut may be this share of the range away from the place that would balance the sizes. Within this
# distance, it is where neighbours have least in common, since both sides compute the common part.
LEEWAY = 0.1


class Parts:
    """The lines of a batch that are not taken yet, in parts.

    Args:
        order: the lines' indexes in the order to send them.
        parts: number of parts; at least 1.
        shared: for each place of the order, how much its prompt has in common with the one before
            it, in any unit. Empty: unknown.
    """

    def __init__(self, order: Sequence[int], parts: int, shared: Sequence[int] = ()) -> None:
        self._order = order
        self._shared = shared
        self._ranges = [*self._divided(0, len(order), parts)]  # places that are left

    def next(self, part: int) -> int | None:
        """Take the next line of a part, and return its index; None: no line is left at all."""
        start, end = self._ranges[part]
        if start == end:
            start, end = self._take_over()
        if start == end:
            return None
        self._ranges[part] = start + 1, end
        return self._order[start]

    def _take_over(self) -> tuple[int, int]:
        """Remove the rear half of the largest part, and return its range."""
        start, end = max(self._ranges, key=lambda places: places[1] - places[0])
        largest = self._ranges.index((start, end))
        middle = self._cut(start, end, 0.5) if end - start > 1 else start
        self._ranges[largest] = start, middle
        return middle, end

    def _divided(self, start: int, end: int, parts: int) -> Sequence[tuple[int, int]]:
        """Return contiguous ranges of about the same size."""
        if parts == 1:
            return [(start, end)]
        left = parts // 2
        middle = self._cut(start, end, left / parts)
        return [
            *self._divided(start, middle, left),
            *self._divided(middle, end, parts - left),
        ]

    def _cut(self, start: int, end: int, share: float) -> int:
        """Return the place at which to cut a range, so that about `share` of it is in front."""
        size = end - start
        middle = start + round(share * size)
        leeway = int(LEEWAY * min(share, 1.0 - share) * size)
        if not self._shared or not leeway:
            return middle
        places = range(max(start + 1, middle - leeway), min(end, middle + leeway + 1))
        return min(places, key=lambda place: (self._shared[place], abs(place - middle)))
