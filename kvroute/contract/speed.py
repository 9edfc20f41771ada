"""How fast an engine computes prompts: its claim, corrected by measured times to first token."""

from dataclasses import dataclass, field
from functools import lru_cache

PRIOR_S = 1.0  # weight of the prediction itself, in seconds of prefill
MEMORY_S = 40.0  # predicted prefill seconds after which an observation's weight is 1/e


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
    """How much slower an engine is than its PrefillModel predicts."""

    predicted_s: float = PRIOR_S  # this and the next: decayed sums over first tokens
    observed_s: float = PRIOR_S
    slowness: float = field(init=False)  # observed seconds per predicted second

    def __post_init__(self) -> None:
        self.slowness = self.observed_s / self.predicted_s

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """Records one prefill; its weight is its predicted time."""
        keep = 1.0 - min(0.5, predicted_s / MEMORY_S)
        self.predicted_s = keep * self.predicted_s + predicted_s
        self.observed_s = keep * self.observed_s + observed_s
        self.slowness = self.observed_s / self.predicted_s
