"""Whether blocks come sooner from host memory than they are computed: by the speeds that this
engine has shown, beginning with what it claims."""

import math
from dataclasses import dataclass, field

from kvroute.contract.speed import PrefillModel, Speed

# Copies are that much shorter than the computing that they save. So a claim weighs as much as one
# millisecond of copies, and 40 ms of them are remembered.
COPIES = 1000.0
FADE_S = 300.0  # without any copy; then a slow tier is tried again


@dataclass
class ReloadPrice:
    """Of one engine. bytes_per_s: of copies from host memory, as claimed. now_s: of any one
    clock."""

    prefill: PrefillModel
    bytes_per_s: float
    token_bytes: float  # of KV
    _computed: Speed = field(default_factory=Speed)
    _copied: Speed = field(default_factory=Speed)
    _copied_s: float = -math.inf  # when the last copy was made

    def compute_s(self, start: int, end: int) -> float:
        """To compute the tokens [start, end) of a prompt."""
        return self._computed.slowness * self.prefill.seconds(start, end)

    def reload_s(self, tokens: int, now_s: float) -> float:
        """To copy that many tokens' blocks to the engine."""
        return self._slowness(now_s) * self._claimed_s(tokens * self.token_bytes)

    def is_cheaper(self, start: int, end: int, now_s: float) -> bool:
        """To reload the tokens [start, end) of a prompt than to compute them."""
        return self.reload_s(end - start, now_s) < self.compute_s(start, end)

    def computed(self, predicted_s: float, observed_s: float) -> None:
        """A step of the engine was to take so long, as its claims say."""
        self._computed.learn(predicted_s, observed_s)

    def copied(self, copied_bytes: int, observed_s: float, now_s: float) -> None:
        """From host memory to the engine. What has faded until now stays so."""
        self._copied.observed_s = self._slowness(now_s) * self._copied.predicted_s
        self._copied.learn(COPIES * self._claimed_s(copied_bytes), COPIES * observed_s)
        self._copied_s = now_s

    def _slowness(self, now_s: float) -> float:
        """Of copies. A tier that was slow gets no further reloads, and nothing else would tell that
        it is fast now: so what was learned of it has to fade."""
        extra = self._copied.slowness - 1.0
        if extra <= 0.0:
            return self._copied.slowness
        return 1.0 + extra * math.exp((self._copied_s - now_s) / FADE_S)

    def _claimed_s(self, copied_bytes: float) -> float:
        return copied_bytes / self.bytes_per_s
