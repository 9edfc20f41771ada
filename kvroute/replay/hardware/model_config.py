"""The shape of a model, from the file config.json that comes with its weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvroute.replay.hardware.profiles import BYTES, Model, ProfileError

# Bytes of a weight by `quant_method` in config.json. Formats with 4 bits have scales, too. Unknown
# methods count as not quantized.
WEIGHT_BYTES = {"fp8": 1.0, "modelopt": 1.0, "mxfp4": 0.53, "awq": 0.53, "gptq": 0.53}


def load_model(file: Path) -> Model:
    """Return the shape of the model of a config.json, or of a folder with one.

    The layers may have experts, of which each token uses some, and may attend only to a window or
    keep a state of fixed size. Such a layer counts as one without keys and values, since windows
    and states are small beside the prompts that routing is about.

    Raises:
        ProfileError: The file cannot be read, or lacks a field.
    """
    try:
        content = json.loads((file / "config.json" if file.is_dir() else file).read_bytes())
    except (OSError, ValueError) as error:
        raise ProfileError(
            f"--model-config is {str(file)!r}, which cannot be read ({error}); expected the "
            "config.json of a model, or its folder"
        ) from None
    try:
        return _model(content.get("text_config", content), content)
    except (KeyError, TypeError, AttributeError, ZeroDivisionError) as error:
        raise ProfileError(
            f"--model-config is {str(file)!r}, which is not the config.json of a transformer: it "
            f"lacks {error}"
        ) from None


def _model(config: Mapping[str, Any], whole: Mapping[str, Any]) -> Model:
    layers, hidden = int(config["num_hidden_layers"]), int(config["hidden_size"])
    heads = int(config["num_attention_heads"])
    head = int(config.get("head_dim") or hidden // heads)
    width, kv_width = heads * head, float(config.get("num_key_value_heads") or heads) * head
    attention = hidden * 2 * (width + kv_width)
    if rank := config.get("kv_lora_rank"):  # latent attention: one latent vector for each token
        kv_width = (int(rank) + int(config["qk_rope_head_dim"])) / 2
        attention = hidden * (2 * width + int(rank))
    experts = int(config.get("num_local_experts") or config.get("num_experts") or 0)
    experts = experts or int(config.get("n_routed_experts") or 0)
    feed_forward = 3 * hidden * int(config["intermediate_size"])  # parameters of one dense layer
    routed, share = 0, 1.0
    if experts:
        size = int(config.get("moe_intermediate_size") or config["intermediate_size"])
        feed_forward = 3 * hidden * size * int(config.get("n_shared_experts") or 0)
        routed = 3 * hidden * size * experts
        used = config.get("num_experts_per_tok") or config["experts_per_token"]
        share = int(used) / experts
    vocabulary = hidden * int(config["vocab_size"])
    embeddings = vocabulary if config.get("tie_word_embeddings") else 2 * vocabulary
    parameters = layers * (attention + feed_forward + routed) + embeddings
    quantization = whole.get("quantization_config") or config.get("quantization_config") or {}
    return Model(
        parameters,
        layers=_full_layers(config, layers),
        width=width,
        kv_width=kv_width,
        expert_parameters=layers * routed,
        expert_share=share,
        weight_bytes=WEIGHT_BYTES.get(str(quantization.get("quant_method")), float(BYTES)),
    )


def _full_layers(config: Mapping[str, Any], layers: int) -> int:
    """Return the number of layers that attend to all tokens."""
    kinds = config.get("layer_types")
    if kinds:
        return max(1, sum(str(kind) == "full_attention" for kind in kinds))
    if every := config.get("full_attention_interval"):
        return max(1, layers // int(every))
    return layers
