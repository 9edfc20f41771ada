"""Pending copies from slower tiers, such as host memory, to the GPU memory of one replica.

They are made for this router's requests. A copy delays its own request and the copies after it. It
takes no compute time of the GPU.
"""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Reloads:
    """The pending copies at one replica."""

    _waiting: set[str] = field(default_factory=set)  # ids of the requests that wait for a copy
    _end_s: float = -math.inf  # predicted end of the last copy

    def wait_s(self, now_s: float) -> float:
        """Return the seconds until all pending copies should be done."""
        return max(0.0, self._end_s - now_s)

    def begin(self, request_id: str, end_s: float) -> None:
        """Add a copy for a request, which is predicted to end at `end_s`."""
        self._end_s = max(self._end_s, end_s)
        self._waiting.add(request_id)

    def end(self, request_id: str) -> None:
        """Remove the copy of a request that has got its first token or has failed."""
        self._waiting.discard(request_id)
        if not self._waiting:
            self._end_s = -math.inf
