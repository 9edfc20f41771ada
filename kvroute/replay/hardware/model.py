"""The speed of a modelled replica; the defaults describe an 8B model on a GPU like H200.

Separate from the engine itself, so that the command line, which names profiles, starts fast.
"""

from dataclasses import dataclass, replace

from kvroute.prefill.speed import PrefillModel

PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)
KV_BYTES = 131_072  # keys and values of a token
HOST_GB_PER_S = 50.0  # of copies from host memory


@dataclass(frozen=True, slots=True)
class EngineModel:
    prefill: PrefillModel = PREFILL
    step_s: float = 5e-3  # each step
    sequence_s: float = 20e-6  # each sequence in it
    context_token_s: float = 27e-9  # each token that a decode reads
    chunk_tokens: int = 8192  # tokens of one step, prefill and decode together
    max_sequences: int = 256

    def alone_s(self, hit_tokens: int, input_tokens: int, output_tokens: int) -> float:
        """From the arrival to the last token, of a request that is alone on a replica."""
        decodes = output_tokens - 1  # the prefill's last step has the first token
        steps = -(-(input_tokens - hit_tokens) // self.chunk_tokens) + decodes
        context_tokens = decodes * input_tokens + decodes * output_tokens // 2  # read, in all
        return (
            self.prefill.seconds(hit_tokens, input_tokens)
            + steps * (self.step_s + self.sequence_s)
            + context_tokens * self.context_token_s
        )

    def at_speed(self, factor: float) -> "EngineModel":
        """The same engine, everything `factor` times as fast."""
        return replace(
            self,
            prefill=PrefillModel(factor * self.prefill.tokens_per_s, self.prefill.attention_tokens),
            step_s=self.step_s / factor,
            sequence_s=self.sequence_s / factor,
            context_token_s=self.context_token_s / factor,
        )
