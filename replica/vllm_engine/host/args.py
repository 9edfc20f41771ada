"""Makes and checks vLLM's arguments for the host tier."""

import logging
import math
import shutil
from collections.abc import Mapping
from typing import Any

from vllm.config import KVTransferConfig

from kvroute.contract.generation import CannotRunError
from kvroute.replica.fabric.pull import FEATURE, PullSettings
from kvroute.replica.vllm_engine.blocks.division import Division
from kvroute.replica.vllm_engine.optional_parts import HOST_MEMORY, SLOWER_TIERS, is_on
from kvroute.settings.replica import ReplicaSettings

log = logging.getLogger("kvroute.replica")

SHARED_MEMORY = "/dev/shm"  # where vLLM creates memory that processes share
PAGE_BYTES = 4096  # size of a memory page
# Minimum size of a host tier, in blocks of each KV cache group. A smaller tier could not store a
# prompt.
MIN_BLOCKS = 16
# Arguments of vLLM that create a host tier or another connector, and conflict with --host-cache-gb.
OTHER_TIERS = ("kv_transfer_config", "kv_offloading_size")


def host_args(
    settings: ReplicaSettings, *, node_bytes: int, on_cpu: bool
) -> Mapping[str, KVTransferConfig]:
    """Return vLLM's arguments for the host tier; none if the settings have no host tier.

    Args:
        settings: The replica's settings.
        node_bytes: The size of the memory of the node or container.
        on_cpu: Whether vLLM computes on CPUs.

    Raises:
        CannotRunError: The tier is larger than the memory, or --engine-args also creates a tier.
    """
    tier_bytes = settings.host_cache_bytes(node_bytes)
    if not (tier_bytes and settings.prefix_caching and is_on(HOST_MEMORY)):
        return {}
    _check(settings, tier_bytes * settings.data_parallel_size, node_bytes)
    package = __package__
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": tier_bytes,
        "eviction_policy": "RetentionPolicy",
        "cache_policy_module_path": f"{package}.policy",
        "offload_prompt_only": False,  # the prompt of a chat's next turn contains the answer
    }
    tiers = slower_tiers(settings)
    if tiers and (not on_cpu or _fits_shared_memory(settings, tier_bytes)):
        extra |= {
            "spec_name": "FabricSpec",
            "spec_module_path": f"{package}.spec",
            "secondary_tiers": tiers,
        }
    elif on_cpu:
        extra |= {"spec_name": "HostTierSpec", "spec_module_path": f"{package}.copies"}
    transfer = KVTransferConfig(
        kv_connector="OffloadingConnector", kv_role="kv_both", kv_connector_extra_config=extra
    )
    return {"kv_transfer_config": transfer}


def slower_tiers(settings: ReplicaSettings) -> list[dict[str, Any]]:
    """Return vLLM's arguments for the tiers behind host memory; the first that has a block is used.

    The ranks of a replica share the folder of the disk cache, and so its size.
    """
    tiers: list[dict[str, Any]] = []
    is_caching = settings.prefix_caching and settings.host_cache_gb != "0"
    if not (is_caching and is_on(HOST_MEMORY) and is_on(SLOWER_TIERS)):
        return tiers
    if settings.disk_cache:
        tiers.append(
            {
                "type": "DiskTier",
                "module_path": f"{__package__}.disk",
                "folder": str(settings.disk_cache),
                "max_bytes": int(settings.disk_cache_gb * 1e9),
            }
        )
    if settings.in_replica(FEATURE, PullSettings).pull == "on":
        tiers.append({"type": "PeerTier", "module_path": f"{__package__}.peers"})
    return tiers


def _fits_shared_memory(settings: ReplicaSettings, tier_bytes: int) -> bool:
    """Return whether processes can share the host memory.

    On GPUs, vLLM shares it in any case, and refuses to start if it does not fit.
    """
    needed, free = tier_bytes * settings.data_parallel_size, shutil.disk_usage(SHARED_MEMORY).free
    if needed <= free:
        return True
    log.warning(
        "pulls from other replicas and the disk cache are off: --host-cache-gb needs %.1f GB in "
        "%s, which has %.1f GB; give the container more, for example with `docker run --shm-size`",
        needed / 1e9,
        SHARED_MEMORY,
        free / 1e9,
    )
    return False


def _check(settings: ReplicaSettings, all_bytes: int, node_bytes: int) -> None:
    if names := [name for name in OTHER_TIERS if settings.engine_args.get(name) is not None]:
        raise CannotRunError(
            f"--engine-args has {names[0]}, and --host-cache-gb is {settings.host_cache_gb}: "
            "both create a tier of the cache in host memory; leave out one of them"
        )
    if all_bytes > node_bytes:
        raise CannotRunError(
            f"--host-cache-gb is {settings.host_cache_gb}, but the node or container has only "
            f"{node_bytes / 1e9:.0f} GB of memory; set a lower value, for example 30%"
        )


def check_tier(settings: ReplicaSettings, division: Division, *, is_caching: bool) -> None:
    """Check, after the engine's start, that it can use its host tier.

    Args:
        settings: The replica's settings.
        division: How the engine divides its cache.
        is_caching: Whether the engine caches prefixes.

    Raises:
        CannotRunError: The engine does not cache prefixes, or the tier is too small.
    """
    size, block_bytes = settings.host_cache_gb, division.host_block_bytes
    blocks = division.host_blocks
    min_blocks = max(MIN_BLOCKS, math.ceil(MIN_BLOCKS * division.blocks_per_unit))
    if not is_caching:
        raise CannotRunError(
            f"--host-cache-gb is {size}, but vLLM does not cache prefixes of this model; leave "
            "--host-cache-gb out"
        )
    if blocks < min_blocks:
        # vLLM rounds a block up to whole pages of memory.
        min_bytes = min_blocks * (block_bytes + PAGE_BYTES) * settings.data_parallel_size
        raise CannotRunError(
            f"--host-cache-gb is {size}, which is enough for only {blocks} blocks of {block_bytes} "
            f"bytes; set at least {math.ceil(min_bytes / 1e6) / 1e3}, or 0 for no tier"
        )
