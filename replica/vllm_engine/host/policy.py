"""Which blocks a host tier drops: in the order of engine/retention.py, as the engine's own memory.

vLLM loads RetentionPolicy by name, in the scheduler's process. A block is a chunk to vLLM, and the
number of its place is its number here. It is idle while nothing copies it: requests use the copies
in the engine's memory.
"""

from collections.abc import Iterable, Sequence

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from kvroute.contract.keep import Keep
from kvroute.replica.engine.pins import PinnedKeys
from kvroute.replica.engine.retention import IdleBlocks


class RetentionPolicy(CachePolicy):
    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.chunks: dict[OffloadKey, ChunkStatus] = {}
        self._keys: dict[int, OffloadKey] = {}  # of each place
        self._idle = IdleBlocks(cache_capacity)
        self._pins = PinnedKeys[OffloadKey]()

    def used(self, keys: Sequence[OffloadKey], keep: Keep) -> None:
        """Record what a request says of its blocks, in the prompt's order. It used them until now:
        of them the last one goes first."""
        ids = self._at_rest(key for key in reversed(keys) if key not in self._pins)
        for id_ in ids:
            self._idle.take(id_)
        self._idle.label([each.chunk_id for each in self._there(keys)], keep)
        self._idle.put(ids)

    def pin(self, name: str, keys: Sequence[OffloadKey]) -> None:
        """These blocks, of a prompt in its order, are never dropped, even if they come later. They
        replace the earlier ones of that name; without any, the pin ends."""
        begun, over = self._pins.change(name, keys)
        for id_ in self._at_rest(begun):
            self._idle.take(id_)
        self._idle.put(self._at_rest(reversed(over)))

    def end(self, session: int) -> None:
        self._idle.end(session)

    # What vLLM calls.

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self.chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus) -> None:
        self.chunks[key] = chunk
        self._keys[chunk.chunk_id] = key

    def remove(self, key: OffloadKey) -> None:
        chunk = self.chunks.pop(key)
        del self._keys[chunk.chunk_id]
        self._idle.forget([chunk.chunk_id])

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        """A request's end says more (`used`)."""

    def mark_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.put([self.chunks[key].chunk_id])

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if key not in self._pins:
            self._idle.take(self.chunks[key].chunk_id)

    def evict(
        self, n: int, protected: set[OffloadKey]
    ) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """None: there are too few besides the protected ones."""
        kept = self._at_rest(key for key in protected if key not in self._pins)
        if len(self._idle) - len(kept) < n:
            return None
        gone = [self._keys.pop(id_) for id_ in self._idle.pop(n, set(kept))]
        return [(key, self.chunks.pop(key)) for key in gone]

    def clear(self) -> None:
        self.chunks.clear()
        self._keys.clear()
        self._idle.clear()
        self._pins.clear()

    def _at_rest(self, keys: Iterable[OffloadKey]) -> list[int]:
        """The numbers of those that are here, and that nothing copies."""
        return [each.chunk_id for each in self._there(keys) if each.ref_cnt == 0]

    def _there(self, keys: Iterable[OffloadKey]) -> list[ChunkStatus]:
        found = map(self.chunks.get, keys)
        return [chunk for chunk in found if chunk is not None]
