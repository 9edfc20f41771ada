"""Makes vLLM's block pools emit events with fingerprints.

vLLM's own event about newly cached blocks contains the tokens of all blocks, but the hashes only of
those blocks that are neither null nor excluded by a mask. So the event does not show which tokens
belong to a hash. This module replaces the event as soon as the pool has made it. The arguments of
the pool's method show at which token each block ends.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm import envs
from vllm.distributed import kv_events
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHashWithGroupId,
    ExternalBlockHash,
    KVCacheBlock,
    get_block_hash,
    get_group_id,
    maybe_convert_block_hash,
)
from vllm.v1.request import Request

from kvroute.blocks.chain import Space
from kvroute.replica.vllm_engine.blocks.events import Removed, Stored
from kvroute.replica.vllm_engine.blocks.request_chain import chain_of


def fingerprint(pool: BlockPool, space: Space) -> None:
    """Change the pool's class, so that it emits events with fingerprints from now on.

    Args:
        pool: The pool.
        space: The properties of the model that its fingerprints depend on.
    """
    pool.__class__ = type("FingerprintedPool", (_Fingerprinted, type(pool)), {})
    pool.kvroute_space = space


def copies_of(pools: Iterable[BlockPool], groups: int) -> list[dict[ExternalBlockHash, int]]:
    """Return, for each group, the number of cached blocks under each hash.

    The hashes have the same form as in events.
    """
    copies: list[dict[ExternalBlockHash, int]] = [{} for _ in range(groups)]
    as_numbers = envs.VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES
    for pool in pools:
        for key, blocks in pool.cached_block_hash_to_block._cache.items():
            hash_, group = get_block_hash(key), copies[get_group_id(key)]
            event_hash = int.from_bytes(hash_[-8:], "big") if as_numbers else hash_
            count = len(blocks) if isinstance(blocks, dict) else 1
            group[event_hash] = group.get(event_hash, 0) + count
    return copies


class _Fingerprinted(BlockPool):
    """A block pool of vLLM that emits the events of blocks/events.py instead of vLLM's."""

    kvroute_space: Space

    def cache_full_blocks(
        self,
        request: Request,
        blocks: list[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        block_mask: list[bool] | None = None,
    ) -> None:
        before = len(self.kv_event_queue)
        super().cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            block_size,
            kv_cache_group_id,
            block_mask,
        )
        if len(self.kv_event_queue) > before:
            ends = [
                (number + 1) * block_size
                for number in range(num_cached_blocks, num_full_blocks)
                if not blocks[number].is_null
                and (block_mask is None or block_mask[number - num_cached_blocks])
            ]
            self._replace_last_event(request, ends, kv_cache_group_id)

    def cache_partial_block(
        self,
        request: Request,
        block: KVCacheBlock,
        num_tokens: int,
        kv_cache_group_id: int,
        *args: Any,
        **kwargs: Any,
    ) -> BlockHashWithGroupId | None:
        before = len(self.kv_event_queue)
        key = super().cache_partial_block(
            request, block, num_tokens, kv_cache_group_id, *args, **kwargs
        )
        if len(self.kv_event_queue) > before:
            self._replace_last_event(request, [num_tokens], kv_cache_group_id)
        return key

    def _emit_block_removed_events(self, block_hashes: list[BlockHashWithGroupId]) -> None:
        if self.enable_kv_cache_events:
            self.kv_event_queue.extend(
                Removed([maybe_convert_block_hash(get_block_hash(key))], get_group_id(key))
                for key in block_hashes
            )

    def _replace_last_event(self, request: Request, ends: Sequence[int], group: int) -> None:
        """Replace vLLM's last event, which is about newly cached blocks of a request.

        Blocks without a fingerprint are left out. A block has none if its prompt is given as
        embeddings, or if it does not end at a multiple of the fingerprints' block size.

        Args:
            request: The request.
            ends: For each block, the number of the request's tokens up to the block's end.
            group: The blocks' KV cache group.
        """
        stored = self.kv_event_queue.pop()
        assert isinstance(stored, kv_events.BlockStored)
        if request.prompt_embeds is not None:
            return
        pairs = [
            (block_hash, block_fingerprint)
            for block_hash, block_fingerprint in zip(
                stored.block_hashes,
                chain_of(request, self.kvroute_space).fingerprints_at(
                    request, ends, self.hash_block_size
                ),
                strict=True,
            )
            if block_fingerprint is not None
        ]
        if pairs:
            hashes, fingerprints = zip(*pairs, strict=True)
            self.kv_event_queue.append(Stored(list(hashes), list(fingerprints), group))
