"""Folders of weights, for tests that update the weights of a model."""

import json
import shutil
from pathlib import Path


def random_weights(model: Path, folder: Path, *, seed: int) -> Path:
    """Write random weights for a model with the model's tensors; return the folder."""
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: tensor
        if tensor.ndim < 2
        else (torch.randn(tensor.shape, generator=generator) * tensor.float().std()).to(
            tensor.dtype
        )
        for file in model.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def empty_weights(
    folder: Path, *, name: str = "w", shape: tuple[int, ...] = (2,), dtype: str = "F32"
) -> Path:
    """Write a safetensors file with one tensor of zeros; return the folder."""
    size = 4 * (shape[0] if shape else 1)
    header = {name: {"dtype": dtype, "shape": list(shape), "data_offsets": [0, size]}}
    packed = json.dumps(header).encode()
    folder.mkdir(parents=True, exist_ok=True)
    content = len(packed).to_bytes(8, "little") + packed + bytes(size)
    (folder / "model.safetensors").write_bytes(content)
    return folder
