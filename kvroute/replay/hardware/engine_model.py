"""The speed of a modelled replica. The defaults describe an 8B model on a GPU like H200.

modelled_engine.py uses these values. This module has no heavy imports, since the command line lists
profiles and must start fast.
"""

from dataclasses import dataclass, replace

from kvroute.prefill.speed import PrefillModel

PREFILL = PrefillModel(tokens_per_s=31_000.0, attention_tokens=32_768.0)
KV_BYTES = 131_072  # bytes of a token's keys and values
HOST_GB_PER_S = 50.0  # speed of copies from host memory in GB/s
DISK_GB_PER_S = 5.0  # speed of reads of a disk cache in GB/s: assumed, as of one NVMe SSD
LINK_GB_PER_S = 10.0  # bandwidth of a replica's network link in each direction, in GB/s
LINK_LATENCY_S = 0.002  # time from the start of a pull over that link to its first bytes


@dataclass(frozen=True, slots=True)
class EngineModel:
    """The times of an engine's steps."""

    prefill: PrefillModel = PREFILL
    step_s: float = 5e-3  # fixed time of each step
    # In a mixture of experts: time to read all experts, and the share of them that a token uses.
    expert_s: float = 0.0
    expert_share: float = 1.0
    sequence_s: float = 20e-6  # time that each sequence adds to a step
    context_token_s: float = 27e-9  # time that each context token of a decode adds to a step
    chunk_tokens: int = 8192  # maximum tokens of a step, prefill and decode together
    max_sequences: int = 256  # maximum number of sequences in a step
    # Part of the time to a first token that is no step, such as the network. It delays only its own
    # request.
    overhead_s: float = 0.0

    def base_s(self, sequences: int, tokens: int) -> float:
        """Return the time of a step without its prompts and contexts.

        Args:
            sequences: number of sequences in the step.
            tokens: number of tokens that the step computes. Each of them uses some of the experts.
        """
        experts_s = self.expert_s * (1 - (1 - self.expert_share) ** tokens)
        return self.step_s + self.sequence_s * sequences + experts_s

    def alone_s(self, hit_tokens: int, input_tokens: int, output_tokens: int) -> float:
        """Return the seconds from arrival to the last token if no other request runs."""
        decodes = output_tokens - 1  # the last step of the prefill generates the first token
        new_tokens = input_tokens - hit_tokens
        chunks = -(-new_tokens // self.chunk_tokens)
        # Sum over all decode steps of the context tokens that the step reads.
        context_tokens = decodes * input_tokens + decodes * output_tokens // 2
        return (
            self.prefill.seconds(hit_tokens, input_tokens)
            + chunks * self.base_s(1, min(new_tokens, self.chunk_tokens))
            + decodes * self.base_s(1, 1)
            + context_tokens * self.context_token_s
            + self.overhead_s
        )

    def at_speed(self, factor: float) -> "EngineModel":
        """Return an engine that is `factor` times as fast in everything."""
        return replace(
            self,
            prefill=PrefillModel(factor * self.prefill.tokens_per_s, self.prefill.attention_tokens),
            step_s=self.step_s / factor,
            expert_s=self.expert_s / factor,
            sequence_s=self.sequence_s / factor,
            context_token_s=self.context_token_s / factor,
        )
