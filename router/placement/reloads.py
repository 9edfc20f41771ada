"""The copies from slower tiers that this router's requests wait for at one replica.

A copy delays its own request, and those behind it, but takes none of the GPU's time.
"""

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class Reloads:
    _waiting: set[str] = field(default_factory=set)  # request ids
    _end_s: float = -math.inf  # when those under way should be over

    def wait_s(self, now_s: float) -> float:
        """Until those under way are over."""
        return max(0.0, self._end_s - now_s)

    def begin(self, request_id: str, end_s: float) -> None:
        """Record a copy of blocks that is expected to end at `end_s`."""
        self._end_s = max(self._end_s, end_s)
        self._waiting.add(request_id)

    def end(self, request_id: str) -> None:
        """Forget a copy: the request's first token came, or will not come."""
        self._waiting.discard(request_id)
        if not self._waiting:
            self._end_s = -math.inf
