"""How much slower an engine is than was predicted of it, as its first tokens show: arithmetic."""

from dataclasses import dataclass, field

PRIOR_S = 1.0  # prefill seconds that the prediction by itself is worth
MEMORY_S = 40.0  # predicted prefill seconds after which an old observation counts 1/e


@dataclass(slots=True)
class Speed:
    predicted_s: float = PRIOR_S  # decayed sums over first tokens
    observed_s: float = PRIOR_S
    slowness: float = field(init=False)  # seconds observed for each one predicted

    def __post_init__(self) -> None:
        self.slowness = self.observed_s / self.predicted_s

    def learn(self, predicted_s: float, observed_s: float) -> None:
        """A prefill took so long; the longer it was to take, the more it counts."""
        keep = 1.0 - min(0.5, predicted_s / MEMORY_S)
        self.predicted_s = keep * self.predicted_s + predicted_s
        self.observed_s = keep * self.observed_s + observed_s
        self.slowness = self.observed_s / self.predicted_s
