"""Loads other weights into vLLM, in the engine's process and in its workers."""

import os
from typing import Any

from vllm.v1.engine.core import EngineCore


def kvroute_load_weights(core: EngineCore, source: str, key: str) -> str:
    """Clear all caches and load weights; return the new format of blocks (EngineFacts.format).

    This is a method of EngineCore (scheduler.py). No request may be running.
    """
    if not core.scheduler.reset_prefix_cache():
        raise RuntimeError("some requests have not ended")
    core.reset_encoder_cache()
    core.model_executor.collective_rpc(load, args=(source,))
    format_: str = core.scheduler.set_weights(key)
    return format_


def load(worker: Any, source: str) -> None:
    """Load the weights in a folder into a worker's model, in place."""
    worker.reload_weights(weights_path=os.path.realpath(source))
    if worker.device.type != "cpu":
        return
    # On CPUs, layers compute with a packed copy of their weights. A layer whose weights are those
    # of another layer, such as a tied output layer, still has its copy of the old ones.
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for layer in worker.model_runner.get_model().modules():
        if hasattr(layer, "cpu_linear") and layer.weight.numel():
            dispatch_cpu_unquantized_gemm(layer, remove_weight=False)
