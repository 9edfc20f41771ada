"""The share of recently computed prompt tokens that a larger cache would have had.

Autoscaling uses it to predict how much more would be computed with fewer replicas. The estimate
comes from the ghost list, a list of recently evicted blocks (ghosts.py).
"""

from kvroute.replica.ghosts import Ghosts

SIZE = "1.25"  # size of the larger cache: a key of ghosts.SIZES
HALF_LIFE_S = 300.0  # seconds after which a computed token counts half


class MissedShare:
    """Computes the share for one engine.

    The caller passes the time, in seconds of any monotonic clock.
    """

    def __init__(self, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._computed_tokens = 0  # computed prompt tokens since the last sample
        self._counted_tokens = 0  # value of the ghost list's hit_tokens at the last sample
        # Decayed sums of computed tokens, and of those that a larger cache would have had.
        self._recent_computed = self._recent_missed = 0.0
        self._sampled_s: float | None = None  # time of the last sample

    def record_computed(self, tokens: int) -> None:
        """Record the number of tokens of a prompt that the engine computed."""
        self._computed_tokens += tokens

    def share(self, now_s: float) -> float:
        """Return the share of recently computed tokens that a larger cache would have had.

        Each call takes a sample of the ghost list.
        """
        missed_tokens = self._ghosts.hit_tokens[SIZE]
        decay = 0.5 ** ((now_s - (self._sampled_s or now_s)) / HALF_LIFE_S)
        self._recent_computed = decay * self._recent_computed + self._computed_tokens
        self._recent_missed = decay * self._recent_missed + missed_tokens - self._counted_tokens
        self._computed_tokens, self._counted_tokens = 0, missed_tokens
        self._sampled_s = now_s
        if self._recent_computed <= 0.0:
            return 0.0
        return min(1.0, self._recent_missed / self._recent_computed)
