"""The files of a LoRA adapter that is added while the cluster runs: checks, and their digest."""

import functools
import hashlib
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from kvroute.blocks.variants import digest_in
from kvroute.contract.adapters import CONFIG_FILE, WEIGHTS_FILES, Adapter, rank_of
from kvroute.contract.unreadable import DECODE_ERRORS
from kvroute.features.adapters.added import MAX_PATH, AdapterFiles

WEIGHTS_FILE = WEIGHTS_FILES[0]  # the only format: the others can contain code
MAX_CONFIG_BYTES = 1 << 20  # largest configuration; usual ones have less than 2,000 bytes
# Limits of the header of a safetensors file. No other thread runs while it is parsed, so a
# replica's streams stand still: for up to 0.5 s with these limits. An adapter for each of 256
# experts in 61 layers has 94,000 tensors, and a header of 15 MB.
MAX_HEADER_BYTES = 32 << 20
MAX_TENSORS = 200_000


class _Tensor(msgspec.Struct):
    """The part of a tensor's entry in the header that is checked."""

    data_offsets: Sequence[int] = ()  # first byte, and the byte after the last; empty: not a tensor


def path_in(root: Path, path: str) -> str:
    """Return the absolute path of an adapter's folder, without reading any files.

    Args:
        root: the folder that has all adapters.
        path: the folder's absolute path, or its path in `root`.

    Raises:
        ValueError: the path is not in `root`, or cannot be a path.
    """
    if not path or len(path) > MAX_PATH or not path.isprintable():
        raise ValueError(f"expected a folder in {root}, of at most {MAX_PATH} characters")
    folder = os.path.normpath(root / path)
    if not Path(folder).is_relative_to(root) or Path(folder) == root:
        raise ValueError(
            f"it is not in {root}; move the adapter there, or start the cluster with another "
            "--lora-root"
        )
    return folder


def check_files(path: str, root: Path, *, max_rank: int) -> AdapterFiles:
    """Check an adapter's files, and return their digest and rank. This reads both files.

    Args:
        path: absolute path of the adapter's folder.
        root: the folder that has all adapters. Links that lead out of it are refused.
        max_rank: the highest rank that the engine can load.

    Raises:
        ValueError: the adapter cannot be used.
    """
    folder = Path(path)
    config, weights = (_inside(folder / name, root) for name in (CONFIG_FILE, WEIGHTS_FILE))
    if config.stat().st_size > MAX_CONFIG_BYTES:
        raise ValueError(f"{config} has more than {MAX_CONFIG_BYTES:,} bytes")
    rank = rank_of(config)
    if rank > max_rank:
        raise ValueError(
            f"the adapter's rank is {rank}, and the replicas load ranks up to {max_rank}; start "
            f"the cluster with --max-lora-rank {rank}"
        )
    _check_tensors(weights)
    return AdapterFiles(digest=_digest(weights, config), rank=rank)


def check_digest(adapter: Adapter) -> None:
    """Check that an added adapter's files are still those of its key.

    Raises:
        ValueError: they have changed, or cannot be read.
    """
    try:
        folder = Path(adapter.path)
        digest = _digest(folder / WEIGHTS_FILE, folder / CONFIG_FILE)
    except OSError as error:
        raise ValueError(f"{error.filename} cannot be read ({error.strerror})") from None
    if digest != digest_in(adapter.name):
        raise ValueError(
            "its files on this machine differ from those with which it was added; restore them, or "
            "remove the adapter and add it again"
        )


def _inside(file: Path, root: Path) -> Path:
    """Return a file after all links. Raises ValueError if it is not a file in `root`."""
    try:
        found = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        reason = getattr(error, "strerror", None) or "a loop of links"
        raise ValueError(f"{file} cannot be read on the replica's machine ({reason})") from None
    if not found.is_relative_to(root.resolve()):
        raise ValueError(f"{file} is a link out of {root}; copy the file into the folder")
    if not found.is_file():
        raise ValueError(f"{file} is not a file")
    return found


def _check_tensors(file: Path) -> None:
    """Raise ValueError if a safetensors file is damaged, for example if its end is missing."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file} is not a safetensors file, or its end is missing")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"the header of {file} has {length:,} bytes, and at most {MAX_HEADER_BYTES:,} are "
                "read; store the adapter with fewer tensors or less metadata"
            )
        header = opened.read(length)
    if header.count(b"{") > MAX_TENSORS:  # each tensor is an object
        raise ValueError(f"{file} has more than {MAX_TENSORS:,} tensors")
    try:
        tensors = msgspec.json.decode(header, type=dict[str, _Tensor])
        tensors.pop("__metadata__", None)
        ends = [tensor.data_offsets[1] for tensor in tensors.values()]
    except (*DECODE_ERRORS, IndexError):
        raise ValueError(f"{file} is not a safetensors file: its header is invalid") from None
    if not ends:
        raise ValueError(f"{file} has no tensors")
    if 8 + length + max(ends) != size:
        raise ValueError(
            f"{file} has {size:,} bytes, and its header says {8 + length + max(ends):,}; copy the "
            "file again"
        )


def _digest(weights: Path, config: Path) -> str:
    signature = [(stat.st_mtime_ns, stat.st_size, stat.st_ino) for stat in _stats(weights, config)]
    return _digest_of(weights, config, tuple(signature))


def _stats(*files: Path) -> Sequence[os.stat_result]:
    return [file.stat() for file in files]


@functools.lru_cache(maxsize=4096)
def _digest_of(weights: Path, config: Path, signature: tuple[tuple[int, int, int], ...]) -> str:
    """Return the digest of both files. `signature` is new when a file has changed."""
    digest = hashlib.sha256(f"{signature[0][1]}\0".encode())
    for file in (weights, config):
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()[:32]
