"""Cache pressure: how many tokens have to be recomputed later for each new token in the caches.

In a full cache, each new block evicts another one. A share r of the evicted blocks is requested
again, computed again, and evicts other blocks in turn. So computing a token costs r + r^2 + ... =
r / (1 - r) further tokens later, which is the pressure.
"""

WEIGHT = 0.01  # weight of the newest prompt in the moving averages
MAX_PRESSURE = 3.0  # upper bound of the pressure


class Pressure:
    """The pressure of all replicas together, estimated from one router's prompts."""

    def __init__(self) -> None:
        # Moving averages of a prompt's tokens: tokens that no replica has cached, and the part of
        # them that was cached before.
        self._computed_tokens = 0.0
        self._evicted_tokens = 0.0

    def record(self, *, computed_tokens: int, evicted_tokens: int) -> None:
        """Record a prompt.

        Args:
            computed_tokens: tokens of the prompt that no replica has cached.
            evicted_tokens: the part of these tokens that some replica had cached before.
        """
        self._computed_tokens += WEIGHT * (computed_tokens - self._computed_tokens)
        self._evicted_tokens += WEIGHT * (evicted_tokens - self._evicted_tokens)

    @property
    def value(self) -> float:
        """Return the pressure, from 0 (no evicted block is requested again) to MAX_PRESSURE."""
        # With r = evicted / computed, r / (1 - r) is evicted / new.
        evicted, new = self._evicted_tokens, self._computed_tokens - self._evicted_tokens
        if new > 0:
            return min(MAX_PRESSURE, evicted / new)
        return MAX_PRESSURE if evicted > 0 else 0.0
