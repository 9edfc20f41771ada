"""The facts that the bytes of a block in host memory depend on, for fabric/block_format.py."""

import dataclasses

import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
    build_offloading_config,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.platforms import current_platform
from vllm.v1.core.kv_cache_utils import get_none_hash_seed

from kvroute.blocks.chain import Space

# Fields of vLLM's parallel configuration that are numbers of one process.
OWN_NUMBERS = {"rank", "data_parallel_index", "data_parallel_size", "data_parallel_rank_local"}


def block_facts(
    connector: OffloadingConnector, space: Space, *, weights: str, row_bytes: int
) -> dict[str, object]:
    """Return the facts. Call this after vLLM has chosen the seed of its block hashes.

    Args:
        connector: The connector of the host tier.
        space: What the fingerprints of the blocks depend on.
        weights: Digest of the model's weights and adapters.
        row_bytes: The size of a block in host memory.
    """
    config = connector._vllm_config
    offloading = build_offloading_config(config, connector._kv_cache_config)
    parallel = dataclasses.asdict(offloading.parallel)
    return {
        "vllm": vllm.__version__,
        "device": current_platform.device_type,
        "weights": weights,
        "space": dataclasses.astuple(space),
        "dtype": str(config.model_config.dtype),
        "quantization": config.model_config.quantization,
        "overrides": config.model_config.hf_overrides,
        "kv_dtype": offloading.model.dtype,
        "groups": [dataclasses.astuple(group) for group in offloading.groups],
        "cache": dataclasses.asdict(offloading.cache),
        "parallel": {name: parallel[name] for name in parallel.keys() - OWN_NUMBERS},
        "layout": [
            offloading.kv_cache_layout,
            offloading.replicated_layout,
            offloading.canonical_layout,
            row_bytes,
        ],
        "hashes": [config.cache_config.prefix_caching_hash_algo, get_none_hash_seed()],
    }
