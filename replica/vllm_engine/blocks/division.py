"""How vLLM divides its KV cache, as its process tells and as the replica's record says."""

from fractions import Fraction

from msgspec import Struct
from vllm.v1.core.kv_cache_coordinator import HybridKVCacheCoordinator
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import KVCacheSpec, get_kv_cache_spec_kind, iter_layer_specs

from kvroute.blocks.cache_groups import CHUNK, FULL, HOST_GROUPS, WINDOW, CacheGroup, Layout
from kvroute.contract.records import TierFacts

UNKNOWN = "unknown"  # a kind of which routers tell no hits


class Division(Struct, frozen=True):
    """vLLM's groups, in its order."""

    unit: int  # tokens of one fingerprint
    hit_tokens: int  # the length of a hit is a multiple of it
    groups: tuple[CacheGroup | None, ...]  # None: it takes no part in prefix caching
    blocks: int = 0  # of vLLM's own size, in this engine's cache
    host_blocks: int = 0  # of that size too, in its host tier; 0: it has none
    host_block_bytes: int = 0  # of one of these

    @property
    def is_plain(self) -> bool:
        """Full attention alone, in blocks of one fingerprint."""
        plain = {CacheGroup(kind, self.unit) for kind in FULL}
        return len(self.groups) == 1 and self.groups[0] in plain

    @property
    def layout(self) -> Layout | None:
        """What is to be known of it besides `unit`."""
        if self.is_plain or not self._entries:
            return None
        return Layout(tuple(self._entries), self.hit_tokens)

    @property
    def members(self) -> tuple[int | None, ...]:
        """For each group, the number of its entry in the layout; then, with a host tier, that of
        what the tier has of it."""
        entries = self._entries
        each = tuple(None if group is None else entries.index(group) for group in self.groups)
        if not self.host_blocks:
            return each
        return *each, *(None if entry is None else HOST_GROUPS + entry for entry in each)

    def host_tier(self, bytes_per_s: float) -> TierFacts | None:
        """As the record has it; None: there is none, or it has no room for one block of each group.
        bytes_per_s: of copies from it, as claimed."""
        blocks = self.capacity_blocks(self.host_blocks)
        if not blocks:
            return None
        return TierFacts(blocks, self.host_block_bytes * self.host_blocks // blocks, bytes_per_s)

    def capacity_blocks(self, blocks: int) -> int:
        """How many blocks of `unit` tokens fit in, as sequences take a block of every group."""
        return int(blocks / self.share)

    @property
    def share(self) -> Fraction:
        """How many blocks of vLLM's own size `unit` tokens of a sequence take."""
        shares = [Fraction(self.unit, group.block_tokens) for group in self.groups if group]
        return sum(shares, Fraction(0)) or Fraction(1)

    @property
    def _entries(self) -> list[CacheGroup]:
        """Groups of equal kind and sizes are one entry."""
        distinct = dict.fromkeys(group for group in self.groups if group)
        return sorted(distinct, key=lambda group: group.kind not in FULL)


def division_of(manager: KVCacheManager, unit: int) -> Division:
    coordinator = manager.coordinator
    is_hybrid = isinstance(coordinator, HybridKVCacheCoordinator)
    return Division(
        unit,
        coordinator._cache_hit_alignment_tokens if is_hybrid else coordinator.scheduler_block_size,
        tuple(
            _group(each.kv_cache_spec, each.block_size) for each in coordinator.single_type_managers
        ),
        manager.block_pool.num_gpu_blocks - 1,  # without the null block
    )


def _group(spec: KVCacheSpec, block_tokens: int) -> CacheGroup | None:
    """block_tokens: under context parallelism more than the layers of one process have."""
    if not spec.prefix_cacheable:
        return None
    kind = get_kv_cache_spec_kind(spec).value
    windows = set(map(_window, iter_layer_specs(spec))) if kind in WINDOW | CHUNK else {0}
    if len(windows) > 1:
        return CacheGroup(UNKNOWN, block_tokens)
    return CacheGroup(kind, block_tokens, windows.pop())


def _window(spec: KVCacheSpec) -> int:
    """Tokens of a sliding window, or of a chunk."""
    window = getattr(spec, "sliding_window", None) or spec.attention_chunk_size
    return int(window)
