"""A host tier tells of its blocks by fingerprints, as the block pools do (blocks/pool.py)."""

from collections.abc import Iterable
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
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.vllm_engine.blocks.events import Removed, Stored
from kvroute.replica.vllm_engine.blocks.request_chain import chain_of


class HostEvents(OffloadingEventsTracker):
    """In the place of the connector's own. groups: of the engine's memory; those of host memory
    have the numbers behind. hash_tokens: of one of a request's block hashes."""

    def __init__(self, groups: int, space: Space, hash_tokens: int) -> None:
        self._groups = groups
        self._space = space
        self._hash_tokens = hash_tokens
        self._begun: dict[OffloadKey, Fingerprint] = {}  # of blocks whose copies are not done

    def record_store(
        self, req: Request, group_config: Any, chunk_idx: int, offload_key: OffloadKey
    ) -> None:
        self._begin(req, (chunk_idx + 1) * group_config.tokens_per_chunk, offload_key)

    def record_partial_store(
        self, req: Request, group_config: Any, boundary_tokens: int, offload_key: OffloadKey
    ) -> None:
        self._begin(req, boundary_tokens, offload_key)

    def record_lookup(self, *args: Any) -> None:
        pass

    def record_partial_lookup(self, *args: Any) -> None:
        pass

    def take_events(self, events: Iterable[OffloadingEvent]) -> list[KVCacheEvent]:
        return [each for event in events for each in self._told(event)]

    def reset(self) -> None:
        self._begun.clear()

    def copies_of(self, keys: Iterable[OffloadKey]) -> list[dict[ExternalBlockHash, int]]:
        """For each group, one under each of the hashes, which are as in events."""
        copies: list[dict[ExternalBlockHash, int]] = [{} for _ in range(self._groups)]
        for key in keys:
            copies[get_offload_group_idx(key)][_name(key)] = 1
        return copies

    def _begin(self, request: Request, end: int, key: OffloadKey) -> None:
        """Of a block without a fingerprint nothing is told."""
        if request.prompt_embeds is not None:
            return
        [found] = chain_of(request, self._space).at(request, [end], self._hash_tokens)
        if found is not None:
            self._begun[key] = found

    def _told(self, event: OffloadingEvent) -> list[KVCacheEvent]:
        by_group: dict[int, list[OffloadKey]] = {}
        for key in event.keys:
            by_group.setdefault(self._groups + get_offload_group_idx(key), []).append(key)
        if event.removed:
            return [Removed(list(map(_name, keys)), group) for group, keys in by_group.items()]
        each = [self._stored(keys, group) for group, keys in by_group.items()]
        return [stored for stored in each if stored.block_hashes]

    def _stored(self, keys: Iterable[OffloadKey], group: int) -> Stored:
        done = [(_name(key), self._begun.pop(key)) for key in keys if key in self._begun]
        return Stored([name for name, _ in done], [found for _, found in done], group)


def _name(key: OffloadKey) -> ExternalBlockHash:
    return maybe_convert_block_hash(BlockHash(get_offload_block_hash(key)))
