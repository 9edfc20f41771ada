"""Copies of the built-in model's files, and tiny models with its tokenizer."""

import shutil
from pathlib import Path

from kvroute.process.builtin_model import BUILTIN_MODEL, resolve


def copy_model_files(folder: Path) -> Path:
    """Copy all files except the weights into a folder, and return the folder."""
    for file in Path(resolve(BUILTIN_MODEL)).iterdir():
        if file.suffix != ".safetensors":
            shutil.copy(file, folder / file.name)
    return folder


def change_template(model: Path) -> None:
    template = model / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another version #}")


def tiny_llama(folder: Path, *, head_dim: int) -> Path:
    """Write a model with one layer and random weights into a folder, and return the folder."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

    folder.mkdir()
    copy_model_files(folder)
    config = LlamaConfig(
        vocab_size=len(AutoTokenizer.from_pretrained(folder)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=head_dim,
        max_position_embeddings=4096,
    )
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return folder
