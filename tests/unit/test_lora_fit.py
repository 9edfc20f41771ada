"""Which adapters belong to a model, given the modules of each worker."""

import re
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kvroute.replica.vllm_engine.core.lora_fit import fit_of, misfit


def worker(layers: Sequence[int], *loras: str, saved: Sequence[str] = (), **more: Any) -> Any:
    """Return a worker that has loaded an adapter with these modules. vLLM has packed some."""
    attention = [f"model.layers.{layer}.attn.qkv_proj" for layer in layers]
    manager = SimpleNamespace(
        modules=[*attention, *(f"model.layers.{layer}.mlp.experts" for layer in layers)],
        packed_modules={name: [name.replace("qkv", each) for each in "qkv"] for name in attention},
        is_pooling_model=more.get("is_pooling_model", False),
        get_adapter=lambda id_: SimpleNamespace(loras=loras, modules_to_save=saved),
    )
    runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return SimpleNamespace(model_runner=runner)


PACKED, EXPERT = "model.layers.1.attn.qkv_proj", "model.layers.0.mlp.experts.7.gate_proj"
BEYOND, ENCODER = "model.layers.2.attn.q_proj", "visual.blocks.0.attn.q_proj"
BARE = PACKED.removeprefix("model.")


@pytest.mark.parametrize(
    ("workers", "why"),
    [
        ([worker([0, 1], PACKED, EXPERT)], ""),
        ([worker([0, 1], PACKED, ENCODER)], ""),  # vLLM applies no adapters to the encoder
        ([worker([0, 1], PACKED, BEYOND)], f"more layers than the model 'm', such as {BEYOND};"),
        ([worker([0, 1], ENCODER)], f"none of its weights .* model 'm', such as {ENCODER};"),
        ([worker([0, 1], BARE, is_pooling_model=True)], ""),
        ([worker([0, 1], BARE)], "none of its weights"),
        ([worker([0, 1], "h.0.q_proj", saved=["score"])], ""),
        # Each worker has some of the layers, and all of the adapter.
        ([worker([0], PACKED, BEYOND), worker([1, 2], PACKED, BEYOND)], ""),
        ([worker([0], PACKED, BEYOND), worker([1], PACKED, BEYOND)], "more layers"),
        ([SimpleNamespace(model_runner=None)], ""),  # another version of vLLM
    ],
)
def test_an_adapter_fits_its_model(workers: Sequence[Any], why: str) -> None:
    reason = misfit([fit_of(each, 1) for each in workers], "m")
    assert re.search(why or r"\A\Z", reason)
