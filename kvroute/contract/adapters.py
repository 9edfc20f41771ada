"""LoRA adapters: their names, folders and digests."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the values of vLLM's --max-lora-rank
CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILES = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class Adapter(BaseModel):
    """A LoRA adapter that clients can request."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str  # clients request it by this name
    path: str  # absolute path of a folder in PEFT's format


def read_adapter(text: str, *, has_files: bool = True) -> Adapter:
    """Parse `NAME=PATH` and check the adapter's files.

    Args:
        text: NAME=PATH.
        has_files: False if an attached server on another machine has the files; they are not
            checked then.

    Raises:
        ValueError: the text has another form, or the adapter's files cannot be used.
    """
    name, _, path = text.partition("=")
    if not (name and path):
        raise ValueError("expected NAME=PATH, such as sql=adapters/sql")
    adapter = Adapter(name=name, path=str(Path(path).expanduser().absolute()))
    if not has_files:
        return adapter
    rank = rank_of(Path(adapter.path) / CONFIG_FILE)
    if rank > RANKS[-1]:
        raise ValueError(
            f"the adapter's rank is {rank}, and vLLM supports ranks up to {RANKS[-1]}; "
            "train the adapter again with a lower rank"
        )
    if _weights(adapter) is None:
        raise ValueError(f"there is no {WEIGHTS_FILES[0]} in {adapter.path}; give another folder")
    return adapter


def sufficient_rank(adapters: Iterable[Adapter], *, at_least: int = 0) -> int:
    """Return the smallest of vLLM's ranks that is enough for all adapters.

    Args:
        adapters: adapters whose files are on this machine.
        at_least: a rank for which the result must be enough, too.
    """
    ranks = (rank_of(Path(adapter.path) / CONFIG_FILE) for adapter in adapters)
    highest = max(at_least, *ranks, 0)
    return next(rank for rank in RANKS if rank >= highest)


def digests(adapters: Iterable[Adapter]) -> dict[str, str]:
    """Return name -> digest of each adapter's files: equal digests mean equal adapters.

    The digest is empty if the files are not on this machine.
    """
    return {adapter.name: _digest(adapter) for adapter in adapters}


def _digest(adapter: Adapter) -> str:
    weights, config = _weights(adapter), Path(adapter.path) / CONFIG_FILE
    if weights is None or not config.is_file():
        return ""
    with weights.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
    digest.update(config.read_bytes())
    return digest.hexdigest()[:16]


def _weights(adapter: Adapter) -> Path | None:
    files = (Path(adapter.path) / name for name in WEIGHTS_FILES)
    return next(filter(Path.is_file, files), None)


def rank_of(file: Path) -> int:
    """Return the highest rank of all layers of an adapter.

    Args:
        file: the adapter's CONFIG_FILE.

    Raises:
        ValueError: the file cannot be read, or has no rank.
    """
    config = _config(file)
    highest = 0
    pattern = config.get("rank_pattern") or {}
    for rank in (config.get("r"), *(pattern.values() if isinstance(pattern, dict) else [pattern])):
        if type(rank) is not int or rank < 1:
            raise ValueError(
                f"{CONFIG_FILE} has the rank {rank!r}; a LoRA adapter has a rank of 1 or more"
            )
        highest = max(highest, rank)
    return highest


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_bytes())
    except RecursionError:
        raise ValueError(f"{file} is nested too deep; give the folder of a LoRA adapter") from None
    except OSError as error:
        raise ValueError(
            f"{file} cannot be read ({error.strerror}); give the folder of a LoRA adapter"
        ) from None
    except ValueError as error:
        raise ValueError(
            f"{file} is not valid JSON ({error}); give the folder of a LoRA adapter"
        ) from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} is not a JSON object; give the folder of a LoRA adapter")
    return config
