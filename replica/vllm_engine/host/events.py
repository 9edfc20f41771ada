"""Emits events with fingerprints for a host tier, as blocks/pool.py does for block pools."""

from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from typing import Any

from vllm.distributed.kv_events import KVCacheEvent
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import OffloadingEventsTracker
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    ExternalBlockHash,
    maybe_convert_block_hash,
)
from vllm.v1.kv_offload.base import (
    OffloadingEvent,
    OffloadKey,
    ReqContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.fabric.block_files import StoredBlock
from kvroute.replica.vllm_engine.blocks.events import Removed, Stored
from kvroute.replica.vllm_engine.blocks.request_chain import chain_of


class HostEvents(OffloadingEventsTracker):
    """Replaces the object that makes the events of vLLM's connector."""

    def __init__(self, groups: int, space: Space, hash_tokens: int) -> None:
        """Create a tracker.

        Args:
            groups: The number of KV cache groups in the engine's memory. In events, group g of
                host memory has the number `groups + g`, and in the disk cache `2 * groups + g`.
            space: The properties of the model that its fingerprints depend on.
            hash_tokens: The number of tokens that one of vLLM's block hashes covers.
        """
        self._groups = groups
        self._space = space
        self._hash_tokens = hash_tokens
        # Blocks that are still being copied to host memory -> their fingerprints.
        self._pending: dict[OffloadKey, Fingerprint] = {}

    def record_store(
        self, req: Request, group_config: Any, chunk_idx: int, offload_key: OffloadKey
    ) -> None:
        self._add_pending(req, (chunk_idx + 1) * group_config.tokens_per_chunk, offload_key)

    def record_partial_store(
        self, req: Request, group_config: Any, boundary_tokens: int, offload_key: OffloadKey
    ) -> None:
        self._add_pending(req, boundary_tokens, offload_key)

    def record_lookup(self, *args: Any) -> None:
        pass

    def record_partial_lookup(self, *args: Any) -> None:
        pass

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        return [converted for event in events for converted in self._converted(event)]

    def reset(self) -> None:
        self._pending.clear()

    def expect(self, request: Request, keys: Iterable[OffloadKey], context: ReqContext) -> None:
        """Record the fingerprints of blocks that will arrive in host memory from elsewhere."""
        ends = context._offload_key_positions
        for key in keys:
            self._add_pending(request, ends[key], key)

    def expect_known(self, blocks: Iterable[StoredBlock]) -> None:
        """Record blocks with known fingerprints that will arrive in host memory."""
        for block in blocks:
            self._pending[OffloadKey(block.key)] = block.fingerprint

    def fingerprint(self, key: OffloadKey) -> Fingerprint | None:
        """Return the fingerprint of a block that has just arrived in host memory, if it has one."""
        return self._pending.get(key)

    def has_group(self, key: OffloadKey) -> bool:
        """Return whether the key belongs to one of the engine's groups."""
        return bool(get_offload_group_idx(key) < self._groups)

    def disk_events(self, changes: Iterable[tuple[StoredBlock, bool]]) -> list[KVCacheEvent]:
        """Return events about the disk cache.

        Args:
            changes: Blocks that were written (True) or deleted (False), in order.
        """
        events: list[KVCacheEvent] = []
        for is_stored, same in groupby(changes, key=itemgetter(1)):
            by_group: dict[int, list[StoredBlock]] = {}
            for block, _ in same:
                group = get_offload_group_idx(OffloadKey(block.key))
                by_group.setdefault(2 * self._groups + group, []).append(block)
            for group, blocks in by_group.items():
                names = [_name(OffloadKey(block.key)) for block in blocks]
                prints = [block.fingerprint for block in blocks]
                events.append(Stored(names, prints, group) if is_stored else Removed(names, group))
        return events

    def forget(self, keys: Iterable[OffloadKey]) -> None:
        """Forget blocks that were expected and have not arrived."""
        for key in keys:
            self._pending.pop(key, None)

    def copies_of(self, keys: Iterable[OffloadKey]) -> list[dict[ExternalBlockHash, int]]:
        """Return, for each group, the number of blocks under each hash, which is always 1.

        The hashes have the same form as in events.
        """
        copies: list[dict[ExternalBlockHash, int]] = [{} for _ in range(self._groups)]
        for key in keys:
            copies[get_offload_group_idx(key)][_name(key)] = 1
        return copies

    def _add_pending(self, request: Request, end: int, key: OffloadKey) -> None:
        """Record a block's fingerprint, if it has one, because its copy to host memory begins."""
        if request.prompt_embeds is not None:
            return
        [fingerprint] = chain_of(request, self._space).fingerprints_at(
            request, [end], self._hash_tokens
        )
        if fingerprint is not None:
            self._pending[key] = fingerprint

    def _converted(self, event: OffloadingEvent) -> list[KVCacheEvent]:
        by_group: dict[int, list[OffloadKey]] = {}
        for key in event.keys:
            by_group.setdefault(self._groups + get_offload_group_idx(key), []).append(key)
        if event.removed:
            return [Removed(list(map(_name, keys)), group) for group, keys in by_group.items()]
        by_groups = [self._stored(keys, group) for group, keys in by_group.items()]
        return [stored for stored in by_groups if stored.block_hashes]

    def _stored(self, keys: Iterable[OffloadKey], group: int) -> Stored:
        done = [(_name(key), self._pending.pop(key)) for key in keys if key in self._pending]
        return Stored([name for name, _ in done], [fingerprint for _, fingerprint in done], group)


def _name(key: OffloadKey) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(get_offload_block_hash(key)))
