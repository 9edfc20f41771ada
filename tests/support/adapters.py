"""Small LoRA adapters for the built-in model. Random weights make the model answer differently."""

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

MODULES = ("q_proj", "v_proj")
STRENGTH = 1.0  # factor for the weights; large enough to change the model's answers


PREFIX = "base_model.model.model.layers."  # beginning of the names of an adapter's weights


def write_adapter(
    folder: Path,
    *,
    seed: int,
    rank: int = 8,
    layers: int | None = None,
    width: int | None = None,
    strength: float = STRENGTH,
    prefix: str = PREFIX,
) -> Path:
    """Write an adapter into a folder in PEFT's format, and return the folder.

    Args:
        folder: The folder, which is created.
        seed: The seed of the weights.
        rank: The adapter's rank.
        layers: The number of layers of the model; None: those of the built-in model.
        width: The model's hidden size; None: that of the built-in model.
        strength: A factor for the weights. A smaller model needs a larger factor.
        prefix: The beginning of the names of the weights.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(MODULES)}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    weights = {
        name.replace(PREFIX, prefix, 1): (strength * matrix).astype(np.float32)
        for name, matrix in _weights(seed, rank, layers, width).items()
    }
    save_file(weights, folder / "adapter_model.safetensors")
    return folder


def _weights(
    seed: int, rank: int, layers: int | None, width: int | None
) -> dict[str, NDArray[np.float32]]:
    model = json.loads((Path(resolve(BUILTIN_MODEL)) / "config.json").read_text())
    rng = np.random.default_rng(seed)
    heads = {"q_proj": model["num_attention_heads"], "v_proj": model["num_key_value_heads"]}
    weights = {}
    for layer in range(layers or model["num_hidden_layers"]):
        for module in MODULES:
            name = f"{PREFIX}{layer}.self_attn.{module}"
            into = (rank, width or model["hidden_size"])
            out = (heads[module] * model["head_dim"], rank)
            weights[f"{name}.lora_A.weight"] = _random(rng, into)
            weights[f"{name}.lora_B.weight"] = _random(rng, out)
    return weights


def _random(rng: np.random.Generator, shape: tuple[int, int]) -> NDArray[np.float32]:
    return rng.normal(0.0, 1 / np.sqrt(shape[1]), shape).astype(np.float32)
