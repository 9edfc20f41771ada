"""Whether blocks come sooner from host memory than they are computed: by the speeds that this
engine has shown, beginning with what it claims."""

from dataclasses import dataclass, field

from kvroute.contract.speed import PrefillModel, Speed

# Copies are that much shorter than the computing that they save. So a claim weighs as much as one
# millisecond of copies, and 40 ms of them are remembered.
COPIES = 1000.0
DOUBT = 0.2  # weight of a reload that was refused: it counts as one that was as fast as claimed


@dataclass
class ReloadPrice:
    """Of one engine. bytes_per_s: of copies from host memory, as claimed."""

    prefill: PrefillModel
    bytes_per_s: float
    token_bytes: float  # of KV
    _computed: Speed = field(default_factory=Speed)
    _copied: Speed = field(default_factory=Speed)

    def compute_s(self, start: int, end: int) -> float:
        """To compute the tokens [start, end) of a prompt."""
        return self._computed.slowness * self.prefill.seconds(start, end)

    def reload_s(self, tokens: int) -> float:
        """To copy that many tokens' blocks to the engine."""
        return self._copied.slowness * self._claimed_s(tokens * self.token_bytes)

    def is_cheaper(self, start: int, end: int) -> bool:
        """To reload the tokens [start, end) of a prompt than to compute them. A tier that was slow
        once is tried again after some refusals: nothing else would tell that it is fast now."""
        if self.reload_s(end - start) < self.compute_s(start, end):
            return True
        weight = DOUBT * COPIES * self._claimed_s((end - start) * self.token_bytes)
        self._copied.learn(weight, weight)
        return False

    def computed(self, predicted_s: float, observed_s: float) -> None:
        """A step of the engine was to take so long, as its claims say."""
        self._computed.learn(predicted_s, observed_s)

    def copied(self, copied_bytes: int, observed_s: float) -> None:
        """From host memory to the engine."""
        self._copied.learn(COPIES * self._claimed_s(copied_bytes), COPIES * observed_s)

    def _claimed_s(self, copied_bytes: float) -> float:
        return copied_bytes / self.bytes_per_s
