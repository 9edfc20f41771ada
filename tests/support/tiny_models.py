"""Tiny models of current architectures, with random weights of a few MB.

They have the built-in model's tokenizer and chat template. Their answers make no sense, but their
KV caches have the same groups as those of the real models.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

CONTEXT = 4096  # context length in tokens
WINDOW = 256  # length of sliding windows and chunks in tokens
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

SHARED = {
    "vocab_size": 49_152,  # as in the tokenizer
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "tie_word_embeddings": True,
    "hidden_size": 64,
    "intermediate_size": 128,
    "max_position_embeddings": CONTEXT,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 32,
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """The configuration of an architecture in transformers."""

    config: str  # name of the configuration's class
    fields: Mapping[str, Any]


def _of(config: str, **fields: Any) -> Architecture:
    return Architecture(config, {**SHARED, **fields})


LINEAR = {
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 1,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
MAMBA2 = {"mamba_d_state": 16, "mamba_n_heads": 4, "mamba_d_head": 32, "mamba_n_groups": 1}

ARCHITECTURES: Mapping[str, Architecture] = {
    "gemma3": _of(
        "Gemma3TextConfig",
        num_hidden_layers=6,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=32,
    ),
    "gpt-oss": _of(
        "GptOssConfig",
        num_hidden_layers=4,
        sliding_window=128,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "olmo3": _of("Olmo3Config", num_hidden_layers=4, sliding_window=WINDOW),
    "mistral": _of("MistralConfig", num_hidden_layers=2, sliding_window=WINDOW),
    "llama4": _of(
        "Llama4TextConfig",
        num_hidden_layers=4,
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=128,
        num_local_experts=2,
        interleave_moe_layer_step=2,
    ),
    "qwen3-next": _of(
        "Qwen3NextConfig",
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        **LINEAR,
    ),
    "qwen3.5": _of(
        "Qwen3_5TextConfig",
        **LINEAR,
    ),
    "granite4": _of(
        "GraniteMoeHybridConfig",
        num_hidden_layers=4,
        layer_types=["mamba", "mamba", "mamba", "attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=128,
        **MAMBA2,
    ),
    "nemotron-h": _of(
        "NemotronHConfig",
        layers_block_type=["mamba", "mlp", "mamba", "attention"],
        mamba_num_heads=4,
        mamba_head_dim=32,
        ssm_state_size=16,
        n_groups=1,
    ),
    "falcon-h1": _of("FalconH1Config", num_hidden_layers=2, mamba_d_ssm=128, **MAMBA2),
    "jamba": _of(
        "JambaConfig",
        num_hidden_layers=4,
        num_experts=2,
        attn_layer_period=4,
        attn_layer_offset=3,
    ),
    "lfm2": _of(
        "Lfm2Config", num_hidden_layers=4, full_attn_idxs=[1, 3], block_dim=64, conv_dim=64
    ),
    "mamba2": _of(
        "Mamba2Config", num_hidden_layers=2, num_heads=4, head_dim=32, state_size=16, n_groups=1
    ),
    "mamba": _of("MambaConfig", num_hidden_layers=2),
}


def tiny_model(architecture: str, folder: Path, **larger: Any) -> Path:
    """Write the model with this name in ARCHITECTURES into a folder, and return the folder.

    The weights are always the same. `larger` changes fields of the configuration, for a model that
    takes longer to compute.
    """
    import torch
    import transformers

    named = ARCHITECTURES[architecture]
    config = getattr(transformers, named.config)(**{**named.fields, **larger})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    for name in TOKENIZER:
        shutil.copy(Path(resolve(BUILTIN_MODEL)) / name, folder / name)
    return folder
