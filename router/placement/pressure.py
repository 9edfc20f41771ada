"""How tight the caches are: how much of what is computed was evicted before.

In a full cache each new block pushes another one out. Of those that go, a share r is asked for
again, is computed again, and pushes others out in turn. So computing a token costs r + r^2 + ... =
r / (1 - r) further tokens later, which is the pressure.
"""

WEIGHT = 0.01  # weight of the latest prompt in the means
MOST = 3.0


class Pressure:
    """Of all replicas together, as one router's prompts show it."""

    def __init__(self) -> None:
        self._computed_tokens = 0.0  # mean tokens to compute of recent prompts
        self._evicted_tokens = 0.0  # mean tokens of these that some replica once had

    def sent(self, *, computed_tokens: int, evicted_tokens: int) -> None:
        """Record a prompt: tokens to compute, and those of them that some replica once had."""
        self._computed_tokens += WEIGHT * (computed_tokens - self._computed_tokens)
        self._evicted_tokens += WEIGHT * (evicted_tokens - self._evicted_tokens)

    @property
    def value(self) -> float:
        """0: nothing that was evicted is asked for again. At most MOST."""
        evicted, new = self._evicted_tokens, self._computed_tokens - self._evicted_tokens
        return min(MOST, evicted / new) if new > 0 else MOST * (evicted > 0)
