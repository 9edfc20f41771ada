"""The speed of a modelled replica; the defaults describe an 8B model on a GPU like H200.

Separate from the engine itself, so that the command line, which names profiles, starts fast.
"""

from dataclasses import dataclass

from kvroute.contract.speed import PrefillModel

PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)


@dataclass(frozen=True, slots=True)
class EngineModel:
    prefill: PrefillModel = PREFILL
    step_s: float = 5e-3  # each step
    sequence_s: float = 20e-6  # each sequence in it
    context_token_s: float = 27e-9  # each token that a decode reads
    chunk_tokens: int = 8192  # tokens of one step, prefill and decode together
    max_sequences: int = 256
