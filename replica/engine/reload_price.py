"""Decides whether copying blocks from host memory (reloading) is faster than computing them.

At first, the speeds are those that the engine claims at its start. Measurements then correct them.
"""

from dataclasses import dataclass, field

from kvroute.prefill.speed import PrefillModel, Speed
from kvroute.replica.engine.copy_speed import CopySpeed


@dataclass
class ReloadPrice:
    """Predicts the times to reload and to compute blocks; `now_s` is in seconds of any clock."""

    prefill: PrefillModel
    copies: CopySpeed
    token_bytes: float  # size of the KV of one token, in bytes
    _computed: Speed = field(default_factory=Speed)  # corrects `prefill` by measured steps

    def compute_s(self, start: int, end: int) -> float:
        """Return the seconds to compute the tokens [start, end) of a prompt."""
        return self._computed.slowness * self.prefill.seconds(start, end)

    def reload_s(self, tokens: int, now_s: float) -> float:
        """Return the seconds to copy the blocks of this many tokens to the engine."""
        return tokens * self.token_bytes / self.copies.bytes_per_s(now_s)

    def is_cheaper(self, start: int, end: int, now_s: float) -> bool:
        """Return whether reloading a prompt's tokens [start, end) is faster than computing them.

        A reload also has to wait for pending copies. That wait does not count, because it delays no
        other request. Routers use the same rule.
        """
        return self.reload_s(end - start, now_s) < self.compute_s(start, end)

    def record_step(self, predicted_s: float, observed_s: float) -> None:
        """Learn the speed of prefill from the predicted and the measured time of one step."""
        self._computed.learn(predicted_s, observed_s)
