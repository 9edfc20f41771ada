"""A simulated host tier: the part of an engine's KV cache that is in host memory.

It stores blocks by their hash, and evicts them in the order of engine/retention.py. The simulated
engine and the engine model of `kvroute replay` both use it. Requests do not hold blocks in it,
because a copy to the engine is assumed to read all its blocks at once when it starts.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import RetentionHint
from kvroute.replica.engine.pins import PinnedKeys
from kvroute.replica.engine.retention import IdleBlocks


class HostCache:
    """The blocks of one engine's host tier. Each block is in a slot."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._idle = IdleBlocks(capacity_blocks)  # slots of all blocks that are not pinned
        self._pins = PinnedKeys[Fingerprint]()
        self.clear()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[Fingerprint]:
        return iter(self._slot_of)

    def __contains__(self, hash_: Fingerprint) -> bool:
        return hash_ in self._slot_of

    def hits(self, hashes: Sequence[Fingerprint], start: int = 0) -> int:
        """Return how many blocks in a row are stored, beginning with hashes[start]."""
        return sum(1 for _ in takewhile(self.__contains__, islice(hashes, start, None)))

    def store(self, hashes: Sequence[Fingerprint]) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Store the blocks of a prompt. If there are too few slots, store only its first blocks.

        Args:
            hashes: The hashes of the prompt's blocks, in the prompt's order.

        Returns:
            The hashes of newly stored blocks, and of the blocks that were evicted for them.
        """
        hashes = list(dict.fromkeys(hashes))[: self.capacity_blocks]
        slots = self._take(hashes)  # stored blocks of this prompt are not evicted for its new ones
        new = [hash_ for hash_ in hashes if hash_ not in self._slot_of]
        new = new[: len(self._blank) + len(self._idle)]
        dropped = self._drop(len(new) - len(self._blank))
        for hash_ in new:
            slot = self._slot_of[hash_] = self._blank.pop()
            self._hash_of[slot] = hash_
        if new:
            slots = self._unpinned(hashes)
        self._put(slots)
        return new, dropped

    def use(self, hashes: Sequence[Fingerprint], hint: RetentionHint | None = None) -> None:
        """Record that a request used these blocks, and set their retention if it is given.

        The hashes are in the prompt's order. Hashes of blocks that are not stored are ignored.
        """
        slots = self._take(hashes)
        if hint is not None:
            self._idle.label(slots, hint)
        self._put(slots)

    def pin(self, name: str, hashes: Sequence[Fingerprint]) -> None:
        """Replace the blocks of a pin: they are never evicted.

        Blocks that are not stored yet are pinned when they are stored. Without any blocks, the pin
        is removed. The hashes are in the prompt's order.
        """
        added, removed = self._pins.change(name, hashes)
        for hash_ in added:
            if (slot := self._slot_of.get(hash_)) is not None:
                self._idle.take(slot)
        self._put(self._unpinned(removed))

    def end(self, session: int) -> None:
        """End a session. The blocks that only it uses are then evicted first."""
        self._idle.end(session)

    def clear(self) -> None:
        self._idle.clear()
        self._pins.clear()
        self._slot_of: dict[Fingerprint, int] = {}
        self._hash_of: dict[int, Fingerprint] = {}
        self._blank = list(range(self.capacity_blocks))  # slots without a block

    def _take(self, hashes: Sequence[Fingerprint]) -> list[int]:
        """Return the slots of these blocks. They cannot be evicted until `_put`."""
        slots = self._unpinned(dict.fromkeys(hashes))
        for slot in slots:
            self._idle.take(slot)
        return slots

    def _unpinned(self, hashes: Iterable[Fingerprint]) -> list[int]:
        """Return the slots of the stored blocks that are not pinned."""
        return [
            self._slot_of[hash_]
            for hash_ in hashes
            if hash_ in self._slot_of and hash_ not in self._pins
        ]

    def _put(self, slots: Sequence[int]) -> None:
        """Let blocks be evicted again, the last one first, so that shared prefixes stay longer."""
        self._idle.put(slots[::-1])

    def _drop(self, count: int) -> list[Fingerprint]:
        """Evict `count` blocks, or none if `count` is negative, and return their hashes."""
        if count <= 0:
            return []
        slots = self._idle.pop(count)
        self._blank += slots
        dropped = [self._hash_of.pop(slot) for slot in slots]
        for hash_ in dropped:
            del self._slot_of[hash_]
        return dropped
