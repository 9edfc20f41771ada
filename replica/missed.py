"""How much of what an engine computes a larger cache would have had, of late."""

from kvroute.replica.ghosts import Ghosts

SIZE = "1.25"  # of the larger cache, as ghosts.py names it
HALF_LIFE_S = 300.0  # of what was seen


class Missed:
    """One engine's; the caller passes the time, in seconds of any monotonic clock."""

    def __init__(self, ghosts: Ghosts) -> None:
        self._ghosts = ghosts
        self._computed_tokens = 0  # of prompts, since the last sample
        self._counted_tokens = 0  # that the ghost list had found by then
        self._recent_computed = self._recent_missed = 0.0  # with decay
        self._sampled_s: float | None = None

    def computed(self, tokens: int) -> None:
        """The engine computes so many tokens of a prompt."""
        self._computed_tokens += tokens

    def share(self, now_s: float) -> float:
        """Of the tokens that were computed, 0 to 1."""
        missed_tokens = self._ghosts.hit_tokens[SIZE]
        keep = 0.5 ** ((now_s - (self._sampled_s or now_s)) / HALF_LIFE_S)
        self._recent_computed = keep * self._recent_computed + self._computed_tokens
        self._recent_missed = keep * self._recent_missed + missed_tokens - self._counted_tokens
        self._computed_tokens, self._counted_tokens = 0, missed_tokens
        self._sampled_s = now_s
        if self._recent_computed <= 0.0:
            return 0.0
        return min(1.0, self._recent_missed / self._recent_computed)
