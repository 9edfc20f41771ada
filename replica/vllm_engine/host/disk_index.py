"""Which blocks have files in the disk cache, and which file is deleted next."""

from collections.abc import Iterable, KeysView, Sequence

from vllm.v1.kv_offload.base import OffloadKey
from vllm.v1.kv_offload.cpu.policies.base import ChunkStatus

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import RetentionHint
from kvroute.replica.fabric.block_files import StoredBlock
from kvroute.replica.vllm_engine.host.policy import RetentionPolicy


class DiskIndex:
    """The blocks of one engine's disk cache, in the order of retention."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity = capacity_blocks
        self.limit = capacity_blocks  # maximum number of blocks at the moment
        self.clear()

    def __len__(self) -> int:
        return len(self._policy.chunks)

    def __contains__(self, key: OffloadKey) -> bool:
        return key in self._policy.chunks

    def keys(self) -> KeysView[OffloadKey]:
        """Return all blocks."""
        return self._policy.chunks.keys()

    def clear(self) -> None:
        """Forget all blocks."""
        self._policy = RetentionPolicy(self._capacity)
        self._fingerprints: dict[OffloadKey, Fingerprint] = {}
        self._free: list[int] = []  # slots of removed blocks
        self._slots = 0  # number of slots that were ever used

    def stored(self, key: OffloadKey) -> StoredBlock:
        """Return a block as it is in the folder."""
        return StoredBlock(key, self._fingerprints[key])

    def set_limit(self, blocks: int) -> list[StoredBlock]:
        """Change the maximum number of blocks, and return the blocks that are evicted."""
        self.limit = max(0, min(blocks, self._capacity))
        return self._evict(len(self) - self.limit, ())

    def add(self, blocks: Sequence[StoredBlock]) -> list[StoredBlock]:
        """Add blocks, and return the blocks that are evicted for them.

        Args:
            blocks: blocks that are not in the index, in the prompt's order. The first ones are
                evicted last. They are at most `limit`.
        """
        evicted = self._evict(
            len(self) + len(blocks) - self.limit, {OffloadKey(block.key) for block in blocks}
        )
        for block in reversed(blocks):
            chunk = ChunkStatus(self._slot())
            chunk.ref_cnt = 0
            key = OffloadKey(block.key)
            self._policy.insert(key, chunk)
            self._policy.mark_evictable(key)
            self._fingerprints[key] = block.fingerprint
        return evicted

    def remove(self, key: OffloadKey) -> StoredBlock | None:
        """Remove a block, and return it; None if it is not in the index."""
        chunk = self._policy.get(key)
        if chunk is None:
            return None
        self._policy.mark_non_evictable(key)
        self._policy.remove(key)
        self._free.append(chunk.chunk_id)
        return StoredBlock(key, self._fingerprints.pop(key))

    def record_use(self, keys: Sequence[OffloadKey], hint: RetentionHint) -> None:
        """Record that a request has used these blocks, and set their retention."""
        self._policy.record_use(keys, hint)

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self._policy.end(session)

    def _evict(self, count: int, protected: Iterable[OffloadKey]) -> list[StoredBlock]:
        if count <= 0:
            return []
        evicted = []
        for key, chunk in self._policy.evict(min(count, len(self)), set(protected)) or ():
            self._free.append(chunk.chunk_id)
            evicted.append(StoredBlock(key, self._fingerprints.pop(key)))
        return evicted

    def _slot(self) -> int:
        if self._free:
            return self._free.pop()
        self._slots += 1
        return self._slots - 1
