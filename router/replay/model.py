"""How fast a modelled replica is; the numbers are those of an 8B model on a GPU like H200.

Apart from the engine itself, since the command line names profiles of it and should start at once.
"""

from dataclasses import dataclass

from router.routing.load import PrefillModel

PREFILL = PrefillModel(tokens_per_s=25_000.0, attention_tokens=32_768.0)


@dataclass(frozen=True, slots=True)
class EngineModel:
    prefill: PrefillModel = PREFILL
    step_s: float = 5e-3  # each step
    sequence_s: float = 20e-6  # each sequence in it
    context_token_s: float = 27e-9  # each token that a decode reads
    chunk_tokens: int = 8192  # tokens of one step, prefill and decode together
    max_sequences: int = 256
