"""A guess of what a server without KV cache events has cached: the prompts that it got last."""

from collections import OrderedDict
from collections.abc import Sequence

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)


class SentBlocks:
    """The blocks of the latest prompts, up to the size of the cache, least recently used first."""

    def __init__(self, capacity_blocks: int) -> None:
        self._capacity_blocks = capacity_blocks
        self._blocks = OrderedDict[Fingerprint, None]()

    def hit_blocks(self, chain: Sequence[Fingerprint]) -> int:
        """Return how many leading blocks of a prompt are probably cached."""
        for number, fingerprint in enumerate(chain):
            if fingerprint not in self._blocks:
                return number
        return len(chain)

    @property
    def held(self) -> list[dict[BlockHash, int]]:
        """Return the cached blocks of the engine's only KV cache group.

        Fingerprints serve as block hashes.
        """
        return [{int(fingerprint): 1 for fingerprint in self._blocks}]

    def sent(self, chain: Sequence[Fingerprint]) -> list[KVEvent]:
        """Record that the server has computed a prompt, and return the changes as events."""
        new = [fingerprint for fingerprint in chain if fingerprint not in self._blocks]
        for fingerprint in reversed(chain):  # like in vLLM, a prompt's end is evicted first
            self._blocks[fingerprint] = None
            self._blocks.move_to_end(fingerprint)
        gone = []
        while len(self._blocks) > self._capacity_blocks:
            gone.append(self._blocks.popitem(last=False)[0])
        changes: list[KVEvent] = []
        if new:
            changes.append(BlockStored(new, new))
        if gone:
            changes.append(BlockRemoved(gone))
        return changes

    def clear(self) -> list[KVEvent]:
        """Forget all blocks, because the server has started again."""
        if not self._blocks:
            return []
        self._blocks.clear()
        return [AllBlocksCleared()]
