"""Prefill speed: an engine's own estimate, corrected by measured times to first token.

The correction is a factor, the slowness: measured time divided by predicted time.
"""

from dataclasses import dataclass, field
from functools import lru_cache

# An observation is one prompt: its predicted and its measured time. Its weight is its predicted
# time divided by the mean predicted time, so an average prompt has the weight 1.
PRIOR_WEIGHT = 1.5  # weight of the engine's own estimate before the first observation
FADE = 0.8  # factor by which each observation reduces the weight of the engine's estimate
# The speed counts as learned once the weight of the engine's estimate is at most this weight.
MIN_PRIOR_WEIGHT = 0.05
MIN_SLOWNESS = 1e-3  # lower limit of slowness; clocks with a coarse resolution can measure 0 s
# Decay: the weight of an observation has fallen to 1/e when the later observations have this total
# weight.
MEMORY = 120.0
# Before the first observation, the mean predicted time is `typical_s`. It counts as this many
# observations.
TYPICAL = 200
RECENT = 6.0  # like MEMORY, but for the sums of recent observations, which show a change of speed
CHANGED = 2.0  # the speed has changed if recent and learned slowness differ by this factor
MAX_WEIGHT = 2.0  # maximum weight of one observation in the sums of recent observations
MEAN_OF = 500  # number of latest observations over which the mean predicted time is taken
MAX_OFF = 4.0  # longer times are cut to this multiple of the expected time
# Weight of a new value in the moving average `step_s`, if the value is below the average.
LATEST_SHORTER = 1 / 4
# Weight of a new value above that average, and of each new value in the moving average `fixed_s`.
LATEST = 1 / 16


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Predicts prefill time. The token after n others takes (1 + n/attention_tokens)/tokens_per_s.

    The second term is the attention to the n tokens before it.
    """

    tokens_per_s: float  # speed at the start of a prompt
    attention_tokens: float  # context length at which a token costs twice as much as the first one

    def seconds(self, start: int, end: int) -> float:
        """Return the time to compute the tokens [start, end) of a prompt: the sum over them."""
        attention = (end * end - start * start) / (2.0 * self.attention_tokens)
        return (end - start + attention) / self.tokens_per_s


@lru_cache
def prefill_model(tokens_per_s: float, attention_tokens: float) -> PrefillModel:
    """Return the model for these values.

    Models are cached: equal values give the same object, so that callers can compare with `is`.
    """
    return PrefillModel(tokens_per_s, attention_tokens)


@dataclass(slots=True)
class Speed:
    """Learns slowness, the ratio of observed to predicted time, from decayed sums of both."""

    predicted_s: float = 0.0  # decayed sum of predicted times
    observed_s: float = 0.0  # decayed sum of observed times
    prior: float = 1.0  # slowness that is assumed before the first observation
    # Mean of the predicted times that is expected before the first observation; 0: unknown.
    typical_s: float = 0.0
    memory: float = MEMORY  # see the constant MEMORY
    slowness: float = field(init=False)  # observed seconds per predicted second
    _mean_s: float = field(init=False, default=0.0)  # mean of the latest predicted times
    _count: int = field(init=False, default=0)  # number of observations, at most MEAN_OF
    # Decayed sums of the recent observations: of predicted times and of observed times.
    _recent: tuple[float, float] = field(init=False, default=(0.0, 0.0))
    _prior_weight: float = field(init=False, default=PRIOR_WEIGHT)  # remaining weight of `prior`

    def __post_init__(self) -> None:
        self.slowness = self.observed_s / self.predicted_s if self.predicted_s else self.prior
        self._mean_s = self.typical_s
        self._count = TYPICAL if self.typical_s else 0

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """Record one observation: the predicted and the measured time of a prompt."""
        if predicted_s <= 0.0:
            return
        self._count = min(MEAN_OF, self._count + 1)
        self._mean_s += (predicted_s - self._mean_s) / self._count
        decay = 1.0 - min(0.5, predicted_s / (self.memory * self._mean_s))
        self._prior_weight *= FADE
        self.predicted_s = decay * self.predicted_s + predicted_s
        self.observed_s = decay * self.observed_s + observed_s
        self._learn_recent(predicted_s, observed_s)
        self.slowness = self.slowness_after(0.0, 0.0)

    def _learn_recent(self, predicted_s: float, observed_s: float) -> None:
        """Add to the recent sums. If these sums show another speed, forget older observations.

        The speed can change, for example, when a GPU becomes hot.
        """
        share = min(1.0, MAX_WEIGHT * self._mean_s / predicted_s)
        decay = 1.0 - share * predicted_s / ((RECENT + MAX_WEIGHT) * self._mean_s)
        recent_predicted_s, recent_observed_s = self._recent
        recent_predicted_s = decay * recent_predicted_s + share * predicted_s
        recent_observed_s = decay * recent_observed_s + share * observed_s
        self._recent = recent_predicted_s, recent_observed_s
        # Recent slowness divided by learned slowness.
        ratio = (
            recent_observed_s * self.predicted_s / max(recent_predicted_s * self.observed_s, 1e-12)
        )
        is_enough = recent_predicted_s > RECENT / 2 * self._mean_s
        if is_enough and not 1.0 / CHANGED < ratio < CHANGED:
            self.predicted_s, self.observed_s = recent_predicted_s, recent_observed_s
            self._prior_weight = 0.0

    @property
    def is_new(self) -> bool:
        """Return whether there are so few observations that the assumed slowness still matters."""
        return self._prior_weight > MIN_PRIOR_WEIGHT

    def set_prior(self, slowness: float) -> None:
        """Replace the slowness that was assumed before the first observation."""
        self.prior = slowness
        self.slowness = self.slowness_after(0.0, 0.0)

    def set_slowness(self, slowness: float) -> None:
        """Replace the learned slowness; keep the weight of the earlier observations."""
        self.prior = self.slowness = slowness
        self.observed_s = slowness * self.predicted_s
        recent_predicted_s, _ = self._recent
        self._recent = recent_predicted_s, slowness * recent_predicted_s

    def slowness_after(self, predicted_s: float, observed_s: float) -> float:
        """Return the slowness after one more observation, without recording it."""
        prior_s = self._prior_weight * (self._mean_s or predicted_s)
        total_s = prior_s + self.predicted_s + predicted_s
        if not total_s:
            return self.prior
        total_observed_s = prior_s * self.prior + self.observed_s + observed_s
        return max(MIN_SLOWNESS, total_observed_s / total_s)


@dataclass(slots=True)
class PrefillSpeed(Speed):
    """The slowness of an engine's prefill, relative to its PrefillModel.

    A time to first token has a fixed part that does not depend on the prompt: the network, the
    scheduler, and a step of the other requests. This fixed part is learned from prompts whose
    prefill takes less time than one step of the engine. The slowness is learned from longer
    prompts.
    """

    step_s: float = 0.0  # moving average of the time between two tokens; 0: unknown
    fixed_s: float = 0.0  # fixed part of a time to first token; 0: unknown

    def step(self, seconds: float) -> None:
        """Record the mean time between the tokens of an answer, which is the time of a step.

        Slow clients can make this time longer, but never shorter, so shorter times weigh more.
        """
        if not self.step_s:
            self.step_s = seconds
        share = LATEST if seconds > self.step_s else LATEST_SHORTER
        self.step_s += share * (min(seconds, 2.0 * self.step_s) - self.step_s)

    def first_token(
        self, predicted_s: float, observed_s: float, *, queued_s: float, is_alone: bool
    ) -> None:
        """Record the time to a first token.

        An observed time is cut to MAX_OFF times the expected time: the prompts alone cannot have
        taken longer, so the rest has another cause.

        Args:
            predicted_s: predicted prefill of the prompt.
            observed_s: seconds to the first token from the earliest time at which the engine can
                have begun this prompt.
            queued_s: predicted prefill of all prompts that the engine may have computed in this
                time, including this prompt.
            is_alone: whether this prompt was the only one without a first token.
        """
        if self.slowness * predicted_s >= self.step_s:
            limit_s = MAX_OFF * self.slowness * max(queued_s, predicted_s)
            computed_s = max(0.0, observed_s - self.fixed_s)
            self.learn(predicted_s, min(computed_s, limit_s))
        elif is_alone:
            expected_s = self.fixed_s or self.step_s
            observed_s = min(observed_s, MAX_OFF * expected_s)
            self.fixed_s = expected_s + LATEST * (observed_s - expected_s)
