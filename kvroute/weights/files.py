"""Checks whether the weights in a folder fit a model, without loading them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvroute.adapters.files import inside, path_in, tensors_in
from kvroute.wording import plural

OPTION = "--weights-root"
CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
FLOATS = {"F64", "F32", "F16", "BF16"}  # vLLM converts these types to its own
# Fields of CONFIG that differ between folders with equal models.
VOLATILE = {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
MAX_NAMES = 3  # tensors or fields that an error names


def folder_in(root: Path, path: str) -> str:
    """Return the absolute path of a folder of weights, without reading the file system.

    Args:
        root: the folder that has all weights.
        path: the folder's absolute path, or its path in `root`.

    Raises:
        ValueError: the path is not in `root`, or cannot be a path.
    """
    return path_in(root, path, files="the weights", option=OPTION)


def check_weights(source: Path, root: Path, model: Path | None) -> None:
    """Check that a folder has complete weights for a model. This reads headers only.

    Args:
        source: the folder with the weights. It needs no CONFIG.
        root: the folder that has all weights. Links that lead out of it are refused.
        model: the folder that the engine was started with; None: the engine has no weights.

    Raises:
        ValueError: the weights cannot be loaded, or belong to another model.
    """
    tensors = _tensors(source, root)
    if model is None:
        return
    own = _tensors(model, None)
    _refuse_names("lacks", own.keys() - tensors.keys(), source)
    _refuse_names("has, unlike the model,", tensors.keys() - own.keys(), source)
    for name, tensor in sorted(tensors.items()):
        if tensor["shape"] != own[name]["shape"]:
            raise ValueError(
                f"{name} has the shape {tensor['shape']}, and in the model {own[name]['shape']}"
            )
        kinds = {tensor["dtype"], own[name]["dtype"]}
        if len(kinds) > 1 and not kinds <= FLOATS:
            raise ValueError(
                f"{name} has the type {tensor['dtype']}, and in the model {own[name]['dtype']}"
            )
    _check_config(source / CONFIG, model / CONFIG)


def _tensors(folder: Path, root: Path | None) -> Mapping[str, Mapping[str, Any]]:
    """Return the tensors in a folder's safetensors files. Raises ValueError."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder on the replica's machine")
    files = sorted(folder.glob("*.safetensors"))
    if (folder / INDEX).is_file():
        listed = set(_json(folder / INDEX).get("weight_map", {}).values())
        files = [file for file in files if file.name in listed]
    if not files:
        raise ValueError(f"{folder} has no safetensors files")
    tensors: dict[str, Mapping[str, Any]] = {}
    for file in files:
        tensors |= tensors_in(inside(file, root) if root else file)
    return tensors


def _check_config(new: Path, own: Path) -> None:
    """Refuse weights whose configuration differs: vLLM would ignore the difference."""
    if not (new.is_file() and own.is_file()):
        return
    theirs, ours = _json(new), _json(own)
    fields = (theirs.keys() | ours.keys()) - VOLATILE
    different = sorted(field for field in fields if theirs.get(field) != ours.get(field))
    if different:
        raise ValueError(
            f"{new} differs from the model's in {_listed(different)}; only the weights of a model "
            "can be updated, not its configuration"
        )


def _json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} is not a JSON object")
    return content


def _refuse_names(verb: str, names: set[str], source: Path) -> None:
    if names:
        raise ValueError(
            f"{source} {verb} {plural(len(names), 'tensor')}: {_listed(sorted(names))}"
        )


def _listed(names: list[str]) -> str:
    more = len(names) - MAX_NAMES
    return ", ".join(names[:MAX_NAMES]) + (f" and {more:,} more" if more > 0 else "")
