"""Host memory keeps blocks by their hash, and drops them in the order in which engines evict.

The simulated engine and the replay's engine model both use it. Nothing holds a block here: a copy
to the engine is taken to have what it needs.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.keep import Keep
from kvroute.replica.engine.pins import PinnedKeys
from kvroute.replica.engine.retention import IdleBlocks


class HostCache:
    """The blocks of one engine's host memory."""

    def __init__(self, capacity_blocks: int) -> None:
        self.capacity_blocks = capacity_blocks
        self._idle = IdleBlocks(capacity_blocks)  # all slots with a block, but for pinned ones
        self._pins = PinnedKeys[Fingerprint]()
        self.clear()

    def __len__(self) -> int:
        return len(self._slot_of)

    def __iter__(self) -> Iterator[Fingerprint]:
        return iter(self._slot_of)

    def __contains__(self, hash_: Fingerprint) -> bool:
        return hash_ in self._slot_of

    def hits(self, hashes: Sequence[Fingerprint], start: int = 0) -> int:
        """How many blocks are here without a gap, from hashes[start] on."""
        return sum(1 for _ in takewhile(self.__contains__, islice(hashes, start, None)))

    def store(self, hashes: Sequence[Fingerprint]) -> tuple[list[Fingerprint], list[Fingerprint]]:
        """Blocks of one prompt, in its order, are here from now on: the first ones, if not all have
        room. Returns those that were not here, and those that were dropped for them."""
        hashes = list(dict.fromkeys(hashes))[: self.capacity_blocks]
        slots = self._take(hashes)  # so that none of them is dropped for another
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

    def use(self, hashes: Sequence[Fingerprint], keep: Keep | None = None) -> None:
        """A request has used these blocks, in its prompt's order, and may say how to keep them.
        Those that are not here do not matter."""
        slots = self._take(hashes)
        if keep is not None:
            self._idle.label(slots, keep)
        self._put(slots)

    def pin(self, name: str, hashes: Sequence[Fingerprint]) -> None:
        """These blocks, of a prompt in its order, are never dropped, even if they come later. They
        replace the earlier ones of that name; without any, the pin ends."""
        begun, over = self._pins.change(name, hashes)
        for hash_ in begun:
            if (slot := self._slot_of.get(hash_)) is not None:
                self._idle.take(slot)
        self._put(self._unpinned(over))

    def end(self, session: int) -> None:
        """Its blocks are dropped first."""
        self._idle.end(session)

    def clear(self) -> None:
        self._idle.clear()
        self._pins.clear()
        self._slot_of: dict[Fingerprint, int] = {}
        self._hash_of: dict[int, Fingerprint] = {}
        self._blank = list(range(self.capacity_blocks))

    def _take(self, hashes: Sequence[Fingerprint]) -> list[int]:
        """Their slots. They cannot be dropped until they are put back."""
        slots = self._unpinned(dict.fromkeys(hashes))
        for slot in slots:
            self._idle.take(slot)
        return slots

    def _unpinned(self, hashes: Iterable[Fingerprint]) -> list[int]:
        """The slots of those that are here and may be dropped."""
        return [
            self._slot_of[hash_]
            for hash_ in hashes
            if hash_ in self._slot_of and hash_ not in self._pins
        ]

    def _put(self, slots: Sequence[int]) -> None:
        """The last ones are dropped first, so that shared prefixes stay longer."""
        self._idle.put(slots[::-1])

    def _drop(self, count: int) -> list[Fingerprint]:
        if count <= 0:
            return []
        slots = self._idle.pop(count)
        self._blank += slots
        dropped = [self._hash_of.pop(slot) for slot in slots]
        for hash_ in dropped:
            del self._slot_of[hash_]
        return dropped
