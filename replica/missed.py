"""The share of recently computed tokens that a larger cache would have had."""

from kvroute.replica.ghosts import Ghosts

SIZE = "1.25"  # name of the larger cache's size in ghosts.py
HALF_LIFE_S = 300.0  # seconds after which earlier tokens count half


class Missed:
    """Measures one engine; the caller passes the time, in seconds of any monotonic clock."""

    def __init__(self, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._computed_tokens = 0  # computed prompt tokens since the last sample
        self._counted_tokens = 0  # the ghost list's hit tokens at the last sample
        # Decayed sums of computed tokens, and of those that a larger cache would have had.
        self._recent_computed = self._recent_missed = 0.0
        self._sampled_s: float | None = None  # time of the last sample

    def computed(self, tokens: int) -> None:
        """Record that the engine computes this many tokens of a prompt."""
        self._computed_tokens += tokens

    def share(self, now_s: float) -> float:
        """Take a sample; return the share of computed tokens that a larger cache would have had."""
        missed_tokens = self._ghosts.hit_tokens[SIZE]
        keep = 0.5 ** ((now_s - (self._sampled_s or now_s)) / HALF_LIFE_S)
        self._recent_computed = keep * self._recent_computed + self._computed_tokens
        self._recent_missed = keep * self._recent_missed + missed_tokens - self._counted_tokens
        self._computed_tokens, self._counted_tokens = 0, missed_tokens
        self._sampled_s = now_s
        if self._recent_computed <= 0.0:
            return 0.0
        return min(1.0, self._recent_missed / self._recent_computed)
