"""vLLM's arguments for a tier of the cache in host memory."""

import math
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig

from kvroute.contract.generation import CannotRunError
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.settings.replica import ReplicaSettings

PAGE = 4096  # size of a memory page in bytes
MIN_BLOCKS = 16  # minimum number of blocks of each group in a tier; fewer hold no prompt
OTHER_TIERS = ("kv_transfer_config", "kv_offloading_size")  # vLLM's arguments for other tiers


def host_args(
    settings: ReplicaSettings, *, node_bytes: int, on_cpu: bool
) -> Mapping[str, KVTransferConfig]:
    """Return vLLM's arguments for the host tier, if the settings ask for one.

    Args:
        settings: The replica's settings.
        node_bytes: The memory of the node or container.
        on_cpu: Whether vLLM computes on CPUs.

    Raises:
        CannotRunError: The tier is larger than the memory, or --engine-args has another tier.
    """
    tier_bytes = settings.host_cache_bytes(node_bytes)
    if not tier_bytes or not settings.prefix_caching:
        return {}
    _check(settings, tier_bytes * settings.data_parallel_size, node_bytes)
    package = __package__
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": tier_bytes,
        "eviction_policy": "RetentionPolicy",
        "cache_policy_module_path": f"{package}.policy",
        "offload_prompt_only": False,  # the prompt of a chat's next turn contains the answer
    }
    if on_cpu:
        extra |= {"spec_name": "HostTierSpec", "spec_module_path": f"{package}.copies"}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return {"kv_transfer_config": transfer}


def _check(settings: ReplicaSettings, all_bytes: int, node_bytes: int) -> None:
    if given := [name for name in OTHER_TIERS if settings.engine_args.get(name) is not None]:
        raise CannotRunError(
            f"--engine-args has {given[0]}, and --host-cache-gb is {settings.host_cache_gb}: "
            "both create a tier of the cache in host memory; leave one of them out"
        )
    if all_bytes > node_bytes:
        raise CannotRunError(
            f"--host-cache-gb is {settings.host_cache_gb}, but the node or container has only "
            f"{node_bytes / 1e9:.0f} GB of memory; choose less, for example 30%"
        )


def check_tier(settings: ReplicaSettings, division: Division, *, is_caching: bool) -> None:
    """Check that the engine that has started can use its host tier.

    Args:
        settings: The replica's settings.
        division: How the engine divides its cache.
        is_caching: Whether the engine caches prefixes.

    Raises:
        CannotRunError: The engine caches no prefixes, or the tier is too small.
    """
    size, block_bytes = settings.host_cache_gb, division.host_block_bytes
    blocks = division.host_blocks
    min_blocks = max(MIN_BLOCKS, math.ceil(MIN_BLOCKS * division.share))
    if not is_caching:
        raise CannotRunError(
            f"--host-cache-gb is {size}, but vLLM does not cache prefixes of this model; leave "
            "--host-cache-gb out"
        )
    if blocks < min_blocks:
        # vLLM rounds a block up to whole pages of memory.
        min_bytes = min_blocks * (block_bytes + PAGE) * settings.data_parallel_size
        raise CannotRunError(
            f"--host-cache-gb is {size}, which has room for only {blocks} blocks of {block_bytes} "
            f"bytes; set at least {math.ceil(min_bytes / 1e6) / 1e3}, or 0 for no tier"
        )
