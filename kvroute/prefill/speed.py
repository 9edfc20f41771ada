"""How fast an engine computes prompts: its claim, corrected by measured times to first token."""

from dataclasses import dataclass, field
from functools import lru_cache

PRIOR = 1.5  # weight of the claimed speed, in observations of mean length
FADE = 0.8  # share of that weight that is left after each observation
LEAST_BELIEF = 0.05  # of that weight: below it only observations count
LEAST_SLOWNESS = 1e-3  # a thousand times as fast as claimed: clocks may tell no time at all
MEMORY = 120.0  # observations of mean length after which an earlier one's weight is 1/e
TYPICAL = 200  # observations that the expected mean length weighs as much as
RECENT = 6.0  # the same of the latest observations, which tell whether the speed has changed
CHANGED = 2.0  # times as slow, or as fast, as learned before: then only the latest count
MOST_WEIGHT = 2.0  # of one of these, in observations of mean length
MEAN_OF = 500  # latest observations whose mean length is taken
MOST_OFF = 4.0  # times as long as expected: what one observation can say at most
LATEST_SHORTER = 1 / 4  # weight of the latest observation in the mean of steps, if it is shorter
LATEST = 1 / 16  # weight of the latest observation in the mean of the fixed part, and of steps


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Prefill time: linear in the tokens, plus attention to all tokens before them."""

    tokens_per_s: float  # at the start of a prompt
    attention_tokens: float  # context length at which a token costs twice as much

    def seconds(self, start: int, end: int) -> float:
        """The time to compute the tokens [start, end) of a prompt."""
        attention = (end * end - start * start) / (2.0 * self.attention_tokens)
        return (end - start + attention) / self.tokens_per_s


@lru_cache
def prefill_model(tokens_per_s: float, attention_tokens: float) -> PrefillModel:
    """Equal replicas share one object, so that a decision compares identities only."""
    return PrefillModel(tokens_per_s, attention_tokens)


@dataclass(slots=True)
class Speed:
    """How much slower something is than was predicted, by decayed sums of both times.

    Weights are relative to the mean prediction. So an engine that is k times slower learns from the
    same number of observations.
    """

    predicted_s: float = 0.0
    observed_s: float = 0.0
    prior: float = 1.0  # slowness as it was believed before the first observation
    typical_s: float = 0.0  # mean prediction that is expected before the first one; 0: unknown
    memory: float = MEMORY  # observations of mean length after which an earlier one weighs 1/e
    slowness: float = field(init=False)  # observed seconds per predicted second
    _mean_s: float = field(init=False, default=0.0)  # of the latest predictions
    _count: int = field(init=False, default=0)  # of observations, at most MEAN_OF
    _recent: tuple[float, float] = field(init=False, default=(0.0, 0.0))  # predicted, observed
    _belief: float = field(init=False, default=PRIOR)  # weight that is left of `prior`

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
        """Forget what was learned before the speed changed: a GPU gets hot, a neighbour comes."""
        share = min(1.0, MOST_WEIGHT * self._mean_s / predicted_s)
        keep = 1.0 - share * predicted_s / ((RECENT + MOST_WEIGHT) * self._mean_s)
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
        return self._belief > LEAST_BELIEF

    def assume(self, slowness: float) -> None:
        """Replace the slowness that was assumed before the first observation."""
        self.prior = slowness
        self.slowness = self.slowness_after(0.0, 0.0)

    def believe(self, slowness: float) -> None:
        """Replace what was learned; the observations keep their weight."""
        self.prior = self.slowness = slowness
        self.observed_s = slowness * self.predicted_s

    def slowness_after(self, predicted_s: float, observed_s: float) -> float:
        """Return the slowness as it would be after one more observation."""
        belief_s = self._belief * (self._mean_s or predicted_s)
        total_s = belief_s + self.predicted_s + predicted_s
        if not total_s:
            return self.prior
        seen_s = belief_s * self.prior + self.observed_s + observed_s
        return max(LEAST_SLOWNESS, seen_s / total_s)


@dataclass(slots=True)
class PrefillSpeed(Speed):
    """How much slower an engine computes prompts than its PrefillModel predicts.

    A first token also takes a time that does not depend on the prompt: the network, the scheduler,
    a step of the other requests. That part is learned from prompts that are computed in less time
    than a step of the engine takes, and these teach nothing of the slowness.
    """

    step_s: float = 0.0  # between two tokens of an answer, of late; 0: none has been seen
    fixed_s: float = 0.0  # of a first token, however short its prompt is

    def step(self, seconds: float) -> None:
        """Record the mean time between the tokens of an answer.

        Clients that read slowly make it longer, so that a short one counts more.
        """
        if not self.step_s:
            self.step_s = seconds
        share = LATEST if seconds > self.step_s else LATEST_SHORTER
        self.step_s += share * (min(seconds, 2.0 * self.step_s) - self.step_s)

    def first_token(
        self, predicted_s: float, observed_s: float, *, queued_s: float, is_alone: bool
    ) -> None:
        """Record the time to a first token.

        One that comes far later than all prompts explain was held up by something else, and counts
        as one that came MOST_OFF times as late as expected.

        Args:
            queued_s: predicted for all prompts that the engine may have computed in that time.
            is_alone: there was only this one.
        """
        if self.slowness * predicted_s >= self.step_s:
            most_s = MOST_OFF * self.slowness * max(queued_s, predicted_s)
            computed_s = max(0.0, observed_s - self.fixed_s)
            self.learn(predicted_s, min(computed_s, most_s))
        elif is_alone:
            expected_s = self.fixed_s or self.step_s
            observed_s = min(observed_s, MOST_OFF * expected_s)
            self.fixed_s = expected_s + LATEST * (observed_s - expected_s)
