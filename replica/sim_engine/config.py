"""The configuration of a simulated engine."""

from collections.abc import Sequence
from dataclasses import dataclass

from kvroute.blocks.variants import SETUP_S
from kvroute.contract.records import EngineFacts, TierFacts
from kvroute.replica.engine.pins import pin_budget

# Prefill speed that an engine reports if its prefill takes no time, in tokens per second.
INSTANT_TOKENS_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class SimulatedConfig:
    """Sizes and speed of an engine. The defaults model an 8B model on one large GPU."""

    model: str = "simulated"  # the model's name in responses
    revision: str = ""
    block_size: int = 32  # number of tokens in a block
    capacity_blocks: int = 4096
    max_model_len: int = 8192  # maximum number of tokens of prompt and answer together
    # Prefill speed at the start of a prompt, in tokens per second. 0: prefill takes no time.
    prefill_tokens_per_s: float = 10_000.0
    # Position in a prompt at which the prefill of a token takes twice as long as at the start.
    attention_tokens: float = 32768.0
    decode_step_s: float = 0.008  # time of every step in seconds, in addition to prefill
    decode_per_seq_s: float = 0.00005  # additional seconds per decoding sequence in a step
    max_running: int = 128  # maximum number of sequences in the batch
    max_batched_tokens: int = 2048  # maximum number of tokens that a step computes
    stream_interval: int = 1  # number of tokens in a chunk; the first chunk always has one
    prefix_caching: bool = True
    pin_share: float = 0.3  # maximum share of the KV cache for pins
    host: TierFacts | None = None  # size and speed of the host tier; it needs prefix_caching
    adapters: frozenset[str] = frozenset()  # names of the LoRA adapters that can be loaded
    max_loras: int = 4  # maximum number of different adapters in a batch
    max_cpu_loras: int = 16  # maximum number of adapters in memory; at least max_loras
    can_add_adapters: bool = False  # whether adapters can be added after the start
    lora_load_s: float = SETUP_S  # seconds to load an adapter; no step runs meanwhile
    # Token ids that are generated if the engine has no tokenizer.
    vocabulary: Sequence[int] = range(1000, 1512)


def facts_of(config: SimulatedConfig) -> EngineFacts:
    """Return what an engine with this configuration publishes about itself."""
    return EngineFacts(
        block_size=config.block_size,
        capacity_blocks=config.capacity_blocks,
        max_model_len=config.max_model_len,
        prefill_tokens_per_s=config.prefill_tokens_per_s or INSTANT_TOKENS_PER_S,
        attention_tokens=config.attention_tokens,
        prefix_caching=config.prefix_caching,
        pin_blocks=pin_budget(
            config.pin_share if config.prefix_caching else 0.0,
            capacity_blocks=config.capacity_blocks,
            block_size=config.block_size,
            max_model_len=config.max_model_len,
        ),
        max_num_seqs=config.max_running,
        step_tokens=config.max_batched_tokens,
        max_variants=config.max_cpu_loras,
        engine="simulated",
        content_format="string",
        host=config.host,
    )
