"""The format of an engine's blocks: a digest of everything that their bytes depend on.

Replicas with equal formats can use each other's blocks. A block's key covers its tokens and its
cache salt, and the format covers the rest.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from kvroute.contract.adapters import Adapter, digests

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
SAMPLES = 64  # places in each file of weights whose bytes are compared
SAMPLE_BYTES = 4096


def format_of(facts: Mapping[str, object]) -> str:
    """Return the format of an engine with these facts, which JSON can represent."""
    packed = json.dumps(facts, sort_keys=True, default=str)
    return hashlib.sha256(packed.encode()).hexdigest()


def weights_digest(model: str, revision: str, adapters: Iterable[Adapter] = ()) -> str:
    """Return a digest of a model's weights and of its adapters.

    Of each file of weights, only samples are read, since a model has hundreds of gigabytes. If the
    weights are not on this machine, their name and revision must be enough.

    Args:
        model: a folder, or a name on the Hugging Face hub.
        revision: the revision on the hub; empty: the default revision.
        adapters: the LoRA adapters that the model is served with.
    """
    digest = hashlib.sha256()
    folder = _folder(model, revision)
    if folder is None:
        digest.update(f"{model}\0{revision}".encode())
    else:
        for file in sorted(file for pattern in WEIGHTS for file in folder.glob(pattern)):
            digest.update(file.name.encode())
            for sample in _samples(file):
                digest.update(sample)
        digest.update(_content(folder / "config.json"))
    digest.update(json.dumps(digests(adapters), sort_keys=True).encode())
    return digest.hexdigest()


def _samples(file: Path) -> Iterator[bytes]:
    """Yield the size of a file, and the bytes at places that are evenly spaced."""
    size = file.stat().st_size
    yield size.to_bytes(8, "little")
    step = max(SAMPLE_BYTES, size // SAMPLES)
    with file.open("rb") as opened:
        for begin in range(0, size, step):
            opened.seek(begin)
            yield opened.read(SAMPLE_BYTES)


def _content(file: Path) -> bytes:
    return file.read_bytes() if file.is_file() else b""


def _folder(model: str, revision: str) -> Path | None:
    """Return the folder with a model's files, if it is on this machine."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(model, "config.json", revision=revision or None)
    return Path(config).parent if isinstance(config, str) else None
