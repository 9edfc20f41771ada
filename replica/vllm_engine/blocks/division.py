"""How vLLM divides its KV cache into groups, and how the replica publishes that as a layout.

Layers with the same kind of attention form a group. The layout tells routers which blocks of each
group a cache hit needs (blocks/cache_groups.py).
"""

from fractions import Fraction

from msgspec import Struct
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, get_kv_cache_spec_kind, iter_layer_specs

from kvroute.blocks.cache_groups import (
    CHUNK,
    DISK_GROUPS,
    FULL,
    HOST_GROUPS,
    WINDOW,
    CacheGroup,
    Layout,
)
from kvroute.contract.records import TierFacts

UNKNOWN = "unknown"  # kind of a group for which routers cannot predict hits


class Division(Struct, frozen=True):
    """vLLM's KV cache groups in vLLM's order, and the number of vLLM's blocks."""

    unit: int  # number of tokens that one fingerprint covers
    hit_tokens: int  # the length of every hit is a multiple of this
    groups: tuple[CacheGroup | None, ...]  # None: the group takes no part in prefix caching
    blocks: int = 0  # number of vLLM's blocks in the engine's own memory
    host_blocks: int = 0  # number of vLLM's blocks in host memory (the host tier); 0: no host tier
    host_block_bytes: int = 0  # size of a block in the host tier, in bytes
    disk_blocks: int = 0  # number of vLLM's blocks in the disk cache; 0: no disk cache

    @property
    def is_plain(self) -> bool:
        """Return whether the cache has only full attention, in blocks of `unit` tokens."""
        plain = {CacheGroup(kind, self.unit) for kind in FULL}
        return len(self.groups) == 1 and self.groups[0] in plain

    @property
    def layout(self) -> Layout | None:
        """Return the layout for the replica's record.

        None: routers need no layout, because the cache has only full attention with blocks of
        `unit` tokens, or because no group takes part in prefix caching.
        """
        if self.is_plain or not self._entries:
            return None
        return Layout(tuple(self._entries), self.hit_tokens)

    @property
    def group_entries(self) -> tuple[int | None, ...]:
        """Return the value of Engine.group_entries: for each group, its entry in the layout.

        An entry is given as its number. None: the group takes no part in prefix caching. With a
        host tier, the entries of the same groups in host memory follow, and then those in the disk
        cache.
        """
        entries = self._entries
        own = tuple(None if group is None else entries.index(group) for group in self.groups)
        tiers = [
            0,
            *[HOST_GROUPS] * bool(self.host_blocks),
            *[DISK_GROUPS] * bool(self.disk_blocks),
        ]
        return tuple(None if entry is None else first + entry for first in tiers for entry in own)

    def host_tier(self, bytes_per_s: float) -> TierFacts | None:
        """Return the host tier for the replica's record.

        Args:
            bytes_per_s: The assumed speed of copies from host memory.

        Returns:
            None if there is no host tier, or if it is too small for one block of each group.
        """
        return self._tier(self.host_blocks, bytes_per_s)

    def disk_tier(self, bytes_per_s: float) -> TierFacts | None:
        """Return the disk cache for the replica's record, as `host_tier` does."""
        return self._tier(self.disk_blocks, bytes_per_s)

    def _tier(self, tier_blocks: int, bytes_per_s: float) -> TierFacts | None:
        blocks = self.capacity_blocks(tier_blocks)
        if not blocks:
            return None
        return TierFacts(blocks, self.host_block_bytes * tier_blocks // blocks, bytes_per_s)

    def capacity_blocks(self, blocks: int) -> int:
        """Return how many blocks of `unit` tokens fit into `blocks` of vLLM's blocks.

        A sequence needs blocks of every group, so `unit` tokens can take several of vLLM's blocks.
        """
        return int(blocks / self.blocks_per_unit)

    @property
    def blocks_per_unit(self) -> Fraction:
        """Return how many of vLLM's blocks `unit` tokens of a sequence take in all groups."""
        shares = [Fraction(self.unit, group.block_tokens) for group in self.groups if group]
        return sum(shares, Fraction(0)) or Fraction(1)

    @property
    def _entries(self) -> list[CacheGroup]:
        """Return the layout's entries, full attention first.

        Groups with the same kind of attention and the same sizes form one entry.
        """
        distinct = dict.fromkeys(group for group in self.groups if group)
        return sorted(distinct, key=lambda group: group.kind not in FULL)


def division_of(manager: KVCacheManager, unit: int) -> Division:
    """Return how `manager` divides its cache. The result has no host tier."""
    coordinator = manager.coordinator
    is_hybrid = isinstance(coordinator, HybridKVCacheCoordinator)
    return Division(
        unit,
        coordinator._cache_hit_alignment_tokens if is_hybrid else coordinator.scheduler_block_size,
        tuple(
            _group(group.kv_cache_spec, group.block_size)
            for group in coordinator.single_type_managers
        ),
        manager.block_pool.num_gpu_blocks - 1,  # without the null block, a placeholder
    )


def _group(spec: KVCacheSpec, block_tokens: int) -> CacheGroup | None:
    """Return a group of the layout; None if the group takes no part in prefix caching.

    The kind is UNKNOWN if the group's layers have windows of different lengths. With context
    parallelism, `block_tokens` is larger than the block size in the spec, because a block's tokens
    are divided among processes.
    """
    if not spec.prefix_cacheable:
        return None
    kind = get_kv_cache_spec_kind(spec).value
    windows = set(map(_window, iter_layer_specs(spec))) if kind in WINDOW | CHUNK else {0}
    if len(windows) > 1:
        return CacheGroup(UNKNOWN, block_tokens)
    return CacheGroup(kind, block_tokens, windows.pop())


def _window(spec: KVCacheSpec) -> int:
    """Return the length of the layer's sliding window or attention chunk, in tokens."""
    window = getattr(spec, "sliding_window", None) or spec.attention_chunk_size
    return int(window)
