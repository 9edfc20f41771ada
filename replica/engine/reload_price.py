"""Whether blocks come sooner from host memory than they are computed: by the speeds that this
engine has shown, beginning with what it claims."""

from dataclasses import dataclass, field

from kvroute.prefill.speed import PrefillModel, Speed
from kvroute.replica.engine.copy_speed import CopySpeed


@dataclass
class ReloadPrice:
    """Of one engine. now_s: of any one clock."""

    prefill: PrefillModel
    copies: CopySpeed
    token_bytes: float  # of KV
    _computed: Speed = field(default_factory=Speed)

    def compute_s(self, start: int, end: int) -> float:
        """To compute the tokens [start, end) of a prompt."""
        return self._computed.slowness * self.prefill.seconds(start, end)

    def reload_s(self, tokens: int, now_s: float) -> float:
        """To copy that many tokens' blocks to the engine."""
        return tokens * self.token_bytes / self.copies.bytes_per_s(now_s)

    def is_cheaper(self, start: int, end: int, now_s: float) -> bool:
        """To reload the tokens [start, end) of a prompt than to compute them. As routers do, it
        leaves out the copies before: a wait for them delays no other request."""
        return self.reload_s(end - start, now_s) < self.compute_s(start, end)

    def computed(self, predicted_s: float, observed_s: float) -> None:
        """A step of the engine was to take so long, as its claims say."""
        self._computed.learn(predicted_s, observed_s)
