"""vLLM's arguments for a tier of the cache in host memory."""

import math
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig

from kvroute.contract.generation import CannotRunError
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.settings.replica import ReplicaSettings

PAGE = 4096  # bytes
LEAST_BLOCKS = 16  # of a tier, of each group; fewer hold no prompt
OTHERS = ("kv_transfer_config", "kv_offloading_size")  # vLLM's names for other tiers


def host_args(
    settings: ReplicaSettings, *, node_bytes: int, on_cpu: bool
) -> Mapping[str, KVTransferConfig]:
    """Nothing without a tier. Raises CannotRunError for one that there cannot be."""
    tier_bytes = settings.host_cache_bytes(node_bytes)
    if not tier_bytes or not settings.prefix_caching:
        return {}
    _check(settings, tier_bytes * settings.data_parallel_size, node_bytes)
    here = __package__
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": tier_bytes,
        "eviction_policy": "RetentionPolicy",
        "cache_policy_module_path": f"{here}.policy",
        "offload_prompt_only": False,  # a chat's next turn has the answer too
    }
    if on_cpu:
        extra |= {"spec_name": "HostTierSpec", "spec_module_path": f"{here}.copies"}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return {"kv_transfer_config": transfer}


def _check(settings: ReplicaSettings, all_bytes: int, node_bytes: int) -> None:
    if given := [name for name in OTHERS if settings.engine_args.get(name) is not None]:
        raise CannotRunError(
            f"--engine-args has {given[0]}, and --host-cache-gb is {settings.host_cache_gb}; "
            "each makes a tier of its own, so leave one of them out"
        )
    if all_bytes > node_bytes:
        raise CannotRunError(
            f"--host-cache-gb is {settings.host_cache_gb}, and its node or container "
            f"has {node_bytes / 1e9:.0f} GB of memory; give less, such as 30%"
        )


def check_tier(settings: ReplicaSettings, division: Division, *, is_caching: bool) -> None:
    """Raises CannotRunError for a tier that is of no use to the engine that has started with it.
    is_caching: it reuses prefixes."""
    size, block_bytes = settings.host_cache_gb, division.host_block_bytes
    blocks = division.host_blocks
    least_blocks = max(LEAST_BLOCKS, math.ceil(LEAST_BLOCKS * division.share))
    if not is_caching:
        raise CannotRunError(
            f"--host-cache-gb is {size}, and vLLM reuses no prefixes of this model; leave it out"
        )
    if blocks < least_blocks:
        # vLLM rounds a block up to whole pages of memory.
        least_bytes = least_blocks * (block_bytes + PAGE) * settings.data_parallel_size
        raise CannotRunError(
            f"--host-cache-gb is {size}, which has room for {blocks} blocks of {block_bytes} "
            f"bytes; give at least {math.ceil(least_bytes / 1e6) / 1e3}, or 0 for no tier"
        )
