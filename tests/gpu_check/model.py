"""A model of Llama 3.1 8B's shape with random weights, and the built-in model's tokenizer."""

import json
import shutil
from pathlib import Path

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve

FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49_152,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model(folder: Path) -> Path:
    """Write the model's files, without weights: vLLM makes random ones (load_format dummy)."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    builtin = Path(resolve(BUILTIN_MODEL))
    for name in FILES:
        if (builtin / name).exists():
            shutil.copy(builtin / name, folder / name)
    return folder
