"""Evicts the blocks of a host tier in the order of engine/retention.py.

vLLM loads RetentionPolicy by name in the scheduler's process. vLLM calls a block of the tier a
chunk. `chunk_id` is the index of its slot in the tier, and also the block's number in IdleBlocks. A
block is idle, that is, it can be evicted, if it is neither pinned nor being copied. Requests do not
hold blocks in the tier, because they use copies in the engine's memory.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.pins import PinnedKeys
from kvroute.replica.engine.retention import IdleBlocks


class RetentionPolicy(CachePolicy):
    """A host tier's policy: which blocks it stores, and which block it evicts next."""

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}  # chunk_id -> key of the block
        self._idle = IdleBlocks(cache_capacity)
        self._pins = PinnedKeys[OffloadKey]()

    def record_use(self, keys: Sequence[OffloadKey], hint: RetentionHint) -> None:
        """Record that a request has just used these blocks, and set their retention.

        The keys are in the prompt's order. The prompt's last block is evicted first.
        """
        ids = self._not_copied(key for key in reversed(keys) if key not in self._pins)
        for id_ in ids:
            self._idle.take(id_)
        self._idle.label([chunk.chunk_id for chunk in self._stored(keys)], hint)
        self._idle.put(ids)

    def pin(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """Replace the blocks of a pin: they are never evicted.

        Blocks that are not stored yet are pinned when they are stored. Without any blocks, the pin
        is removed. The keys are in the prompt's order.
        """
        added, removed = self._pins.change(name, keys)
        for id_ in self._not_copied(added):
            self._idle.take(id_)
        self._idle.put(self._not_copied(reversed(removed)))

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
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
        """Do nothing, because `record_use` is called at the request's end."""

    def mark_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.put([self.chunks[key].chunk_id])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.take(self.chunks[key].chunk_id)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """Evict `n` blocks.

        If fewer than `n` blocks are idle and not protected, evict none and return None.
        """
        idle_protected = self._not_copied(key for key in protected if key not in self._pins)
        if len(self._idle) - len(idle_protected) < n:
            return None
        evicted = [self._keys.pop(id_) for id_ in self._idle.pop(n, set(idle_protected))]
        return [(key, self.chunks.pop(key)) for key in evicted]

    def clear(self) -> None:
        self.chunks.clear()
        self._keys.clear()
        self._idle.clear()
        self._pins.clear()

    def _not_copied(self, keys: Iterable[OffloadKey]) -> list[int]:
        """Return the chunk ids of those blocks that are stored and not being copied."""
        return [chunk.chunk_id for chunk in self._stored(keys) if chunk.ref_cnt == 0]

    def _stored(self, keys: Iterable[OffloadKey]) -> list[ChunkStatus]:
        return [chunk for key in keys if (chunk := self.chunks.get(key)) is not None]
