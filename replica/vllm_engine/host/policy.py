"""Evicts a host tier's blocks in the order of engine/retention.py, as in the engine's memory.

vLLM loads RetentionPolicy by name, in the scheduler's process. vLLM calls a block a chunk; the
index of the chunk's place is the block's number here. A block is idle while it is not being copied:
requests use the copies in the engine's memory.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.pins import PinnedKeys
from kvroute.replica.engine.retention import IdleBlocks


class RetentionPolicy(CachePolicy):
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}  # place -> key of the block there
        self._idle = IdleBlocks(cache_capacity)
        self._pins = PinnedKeys[OffloadKey]()

    def used(self, keys: Sequence[OffloadKey], keep: RetentionHint) -> None:
        """Record that a request used these blocks until now, and set their retention.

        The keys are in the prompt's order; the last of the blocks is evicted first.
        """
        ids = self._not_copied(key for key in reversed(keys) if key not in self._pins)
        for id_ in ids:
            self._idle.take(id_)
        self._idle.label([each.chunk_id for each in self._stored(keys)], keep)
        self._idle.put(ids)

    def pin(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """Never evict these blocks, which may also be stored later.

        They are in the prompt's order and replace the pin's earlier blocks. Without any, the pin
        ends.
        """
        added, removed = self._pins.change(name, keys)
        for id_ in self._not_copied(added):
            self._idle.take(id_)
        self._idle.put(self._not_copied(reversed(removed)))

    def end(self, session: int) -> None:
        self._idle.end(session)

    # Methods that vLLM calls.

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, **_: object) -> None:
        """Add a chunk. vLLM 0.33 also passes the request, which does not matter here."""
        self.chunks[key] = chunk
        self._keys[chunk.chunk_id] = key

    def remove(self, key: OffloadKey) -> None:
        chunk = self.chunks.pop(key)
        del self._keys[chunk.chunk_id]
        self._idle.forget([chunk.chunk_id])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """Do nothing: `used` is called at the request's end."""

    def mark_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.put([self.chunks[key].chunk_id])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.take(self.chunks[key].chunk_id)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict `n` blocks; evict none and return None if too few are not protected."""
        kept = self._not_copied(key for key in protected if key not in self._pins)
        if len(self._idle) - len(kept) < n:
            return None
        evicted = [self._keys.pop(id_) for id_ in self._idle.pop(n, set(kept))]
        return [(key, self.chunks.pop(key)) for key in evicted]

    def clear(self) -> None:
        self.chunks.clear()
        self._keys.clear()
        self._idle.clear()
        self._pins.clear()

    def _not_copied(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the numbers of the stored blocks that are not being copied."""
        return [chunk.chunk_id for chunk in self._stored(keys) if chunk.ref_cnt == 0]

    def _stored(self, keys: Iterable[OffloadKey]) -> list[ChunkStatus]:
        return [chunk for key in keys if (chunk := self.chunks.get(key)) is not None]
