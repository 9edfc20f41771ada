"""Finds out whether a LoRA adapter that vLLM has loaded is one of the model.

vLLM ignores weights of modules that the model does not have. An adapter of another model, or of a
larger one, would answer as the model itself.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MAX_NAMED = 3  # the most modules that an error names


class Fit(NamedTuple):
    """What one worker finds out. With pipeline parallelism, each worker has some of the layers."""

    has_weights: bool  # whether some weights belong to modules of the worker
    unknown: set[str]  # names of modules of the adapter that the worker does not have
    kinds: set[str]  # names of the worker's modules without the numbers of layers


def fit_of(worker: Any, lora_id: int) -> Fit | None:
    """Return what a worker finds out; None if its version of vLLM has other parts."""
    try:
        manager = worker.model_runner.lora_manager._adapter_manager
        adapter = manager.get_adapter(lora_id)
        packed = manager.packed_modules.values()
        known = {*manager.modules, *(name for names in packed for name in names)}
        if manager.is_pooling_model:
            known |= {name.removeprefix("model.") for name in known}
        unknown = {name for name in adapter.loras if not _is_in(name, known)}
        has_weights = len(unknown) < len(adapter.loras) or bool(adapter.modules_to_save)
    except AttributeError:
        return None
    return Fit(has_weights, unknown, {*map(_kind, known)})


def misfit(fits: Sequence[Fit | None], model: str) -> str:
    """Return why an adapter does not fit the model with this name; empty: it fits.

    An adapter may have weights for some modules to which vLLM applies no adapters, such as those of
    an encoder of images. It must not have more layers than the model.

    Args:
        fits: what each worker has found out.
    """
    found = [fit for fit in fits if fit is not None]
    if len(found) < len(fits) or not found:
        return ""
    unknown = set.intersection(*(fit.unknown for fit in found))
    if not any(fit.has_weights for fit in found):
        return f"none of its weights belong to a module of the model {model!r}, {_named(unknown)}"
    kinds = set.union(*(fit.kinds for fit in found))
    if beyond := {name for name in unknown if _kind(name) in kinds}:
        return f"it has more layers than the model {model!r}, {_named(beyond)}"
    return ""


def _is_in(module: str, known: set[str]) -> bool:
    """Return whether a module is one of these, or a part of one, as an expert is."""
    while module and module not in known:
        module = module.rpartition(".")[0]
    return bool(module)


def _kind(module: str) -> str:
    return re.sub(r"\d+", "N", module)


def _named(modules: Iterable[str]) -> str:
    return f"such as {', '.join(sorted(modules)[:MAX_NAMED])}; use it with its own model"
