"""Prefill speed: an engine's own estimate, corrected by measured times to first token."""

from dataclasses import dataclass, field
from functools import lru_cache

# Weights are in observations of mean length, that is of the mean predicted time.
PRIOR = 1.5  # weight of the engine's own estimate before the first observation
FADE = 0.8  # factor on the weight of that estimate after each observation
MIN_BELIEF = 0.05  # if that estimate's weight is lower, the speed counts as learned
MIN_SLOWNESS = 1e-3  # lower limit of slowness; clocks with a coarse resolution can measure 0 s
MEMORY = 120.0  # after new observations of this total weight, an older observation counts 1/e
TYPICAL = 200  # an expected mean length has the weight of this many observations in the mean
RECENT = 6.0  # like MEMORY, for the sums of recent observations that detect a change of speed
CHANGED = 2.0  # ratio of recent to learned slowness, or its inverse, that is a change of speed
MAX_WEIGHT = 2.0  # most weight of one observation among the recent observations
MEAN_OF = 500  # number of latest observations in the mean length
MAX_OFF = 4.0  # an observation counts as this multiple of the expected time at most
LATEST_SHORTER = 1 / 4  # weight of a new step in the moving average of steps, if it is shorter
LATEST = 1 / 16  # weight of a new value in the moving averages of the fixed part and of steps


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Predicts prefill time: linear in the tokens, plus attention to all tokens before them."""

    tokens_per_s: float  # speed at the start of a prompt
    attention_tokens: float  # context length at which a token costs twice as much

    def seconds(self, start: int, end: int) -> float:
        """Return the time to compute the tokens [start, end) of a prompt."""
        attention = (end * end - start * start) / (2.0 * self.attention_tokens)
        return (end - start + attention) / self.tokens_per_s


@lru_cache
def prefill_model(tokens_per_s: float, attention_tokens: float) -> PrefillModel:
    """Return a cached model: replicas of equal speed share one, and `is` can compare them."""
    return PrefillModel(tokens_per_s, attention_tokens)


@dataclass(slots=True)
class Speed:
    """Slowness: the ratio of observed to predicted time, from decayed sums of both.

    Weights are relative to the mean prediction, so slow and fast engines learn from the same number
    of observations.
    """

    predicted_s: float = 0.0  # decayed sum of predicted times
    observed_s: float = 0.0  # decayed sum of observed times
    prior: float = 1.0  # slowness that is assumed before the first observation
    typical_s: float = 0.0  # mean prediction that is expected before the first one; 0: unknown
    memory: float = MEMORY  # see the constant MEMORY
    slowness: float = field(init=False)  # observed seconds per predicted second
    _mean_s: float = field(init=False, default=0.0)  # mean of the latest predictions
    _count: int = field(init=False, default=0)  # number of observations, at most MEAN_OF
    # Decayed sums of recent predicted and observed times.
    _recent: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    _belief: float = field(init=False, default=PRIOR)  # remaining weight of `prior`

    def __post_init__(self) -> None:
        self.slowness = self.observed_s / self.predicted_s if self.predicted_s else self.prior
        self._mean_s = self.typical_s
        self._count = TYPICAL if self.typical_s else 0

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """Record one observation; its weight is its predicted time."""
        if predicted_s <= 0.0:
            return
        self._count = min(MEAN_OF, self._count + 1)
        self._mean_s += (predicted_s - self._mean_s) / self._count
        keep = 1.0 - min(0.5, predicted_s / (self.memory * self._mean_s))
        self._belief *= FADE
        self.predicted_s = keep * self.predicted_s + predicted_s
        self.observed_s = keep * self.observed_s + observed_s
        self._learn_recent(predicted_s, observed_s)
        self.slowness = self.slowness_after(0.0, 0.0)

    def _learn_recent(self, predicted_s: float, observed_s: float) -> None:
        """Forget older observations if the speed has changed, for example because a GPU is hot."""
        share = min(1.0, MAX_WEIGHT * self._mean_s / predicted_s)
        keep = 1.0 - share * predicted_s / ((RECENT + MAX_WEIGHT) * self._mean_s)
        recent_s, seen_s = self._recent
        recent_s, seen_s = keep * recent_s + share * predicted_s, keep * seen_s + share * observed_s
        self._recent = recent_s, seen_s
        ratio = seen_s * self.predicted_s / max(recent_s * self.observed_s, 1e-12)
        is_enough = recent_s > RECENT / 2 * self._mean_s
        if is_enough and not 1.0 / CHANGED < ratio < CHANGED:
            self.predicted_s, self.observed_s, self._belief = recent_s, seen_s, 0.0

    @property
    def is_new(self) -> bool:
        """Return whether the assumed slowness still counts beside the observations."""
        return self._belief > MIN_BELIEF

    def assume(self, slowness: float) -> None:
        """Replace the slowness that was assumed before the first observation."""
        self.prior = slowness
        self.slowness = self.slowness_after(0.0, 0.0)

    def believe(self, slowness: float) -> None:
        """Replace the learned slowness; the weight of earlier observations stays."""
        self.prior = self.slowness = slowness
        self.observed_s = slowness * self.predicted_s
        recent_s, _ = self._recent
        self._recent = recent_s, slowness * recent_s

    def slowness_after(self, predicted_s: float, observed_s: float) -> float:
        """Return what the slowness would be after one more observation."""
        belief_s = self._belief * (self._mean_s or predicted_s)
        total_s = belief_s + self.predicted_s + predicted_s
        if not total_s:
            return self.prior
        seen_s = belief_s * self.prior + self.observed_s + observed_s
        return max(MIN_SLOWNESS, seen_s / total_s)


@dataclass(slots=True)
class PrefillSpeed(Speed):
    """The slowness of an engine's prefill, relative to its PrefillModel.

    A time to first token has a fixed part that does not depend on the prompt: the network, the
    scheduler, a step of the other requests. Prompts with less prefill than one step of the engine
    teach the fixed part. All other prompts teach the slowness.
    """

    step_s: float = 0.0  # moving average of the time between two tokens; 0: unknown
    fixed_s: float = 0.0  # fixed part of a time to first token; 0: unknown

    def step(self, seconds: float) -> None:
        """Record the mean time between the tokens of an answer.

        Slow clients only make the measured time longer, so shorter times get a higher weight.
        """
        if not self.step_s:
            self.step_s = seconds
        share = LATEST if seconds > self.step_s else LATEST_SHORTER
        self.step_s += share * (min(seconds, 2.0 * self.step_s) - self.step_s)

    def first_token(
        self, predicted_s: float, observed_s: float, *, queued_s: float, is_alone: bool
    ) -> None:
        """Record the time to a first token.

        The time is cut to MAX_OFF times the expected time: a longer delay has another cause than
        the prompts.

        Args:
            predicted_s: predicted prefill of the prompt.
            observed_s: seconds from the earliest possible start to the first token.
            queued_s: predicted prefill of all prompts that the engine may have computed meanwhile.
            is_alone: whether the engine had only this prompt.
        """
        if self.slowness * predicted_s >= self.step_s:
            most_s = MAX_OFF * self.slowness * max(queued_s, predicted_s)
            computed_s = max(0.0, observed_s - self.fixed_s)
            self.learn(predicted_s, min(computed_s, most_s))
        elif is_alone:
            expected_s = self.fixed_s or self.step_s
            observed_s = min(observed_s, MAX_OFF * expected_s)
            self.fixed_s = expected_s + LATEST * (observed_s - expected_s)
