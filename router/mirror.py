"""Which replicas hold a prompt's leading blocks, answered from memory alone.

Each fingerprint maps to a bit mask of replica slots. A replica that holds block i of a chain holds
the blocks before it, because engines evict leaves first; so how far each replica's match goes is
found by galloping and bisection, in about ten dictionary reads for a prompt of a thousand blocks.
"""

from collections.abc import Iterable, Iterator, Sequence

from replica.kvindex.fingerprint import Fingerprint
from router.masks import TABLES, Masks


class Mirror:
    """The fleet's index in this process. A slot is a bit; a replica that clears gets a new one."""

    def __init__(self) -> None:
        self._held = Masks()
        self._expected = Masks()
        self._slots: dict[str, int] = {}  # replica id -> its bit
        self._ids: dict[int, str] = {}  # bit -> replica id
        self._live = 0  # bits in use; all others in a mask mean nothing
        self._dirty = 0  # bits given up, perhaps still set in some masks
        self._sweeping = 0  # the bits among them that the sweep under way cleans
        self._unswept = 0  # tables that it has still to clean

    def __len__(self) -> int:
        """Fingerprints known, of live replicas or not yet swept."""
        return len(self._held)

    @property
    def replica_ids(self) -> set[str]:
        return set(self._slots)

    def join(self, replica_id: str) -> None:
        """The replica holds nothing, whatever was known of it before."""
        self.drop(replica_id)
        bit = self._free_bit()
        self._slots[replica_id] = bit
        self._ids[bit] = replica_id
        self._live |= bit

    def drop(self, replica_id: str) -> None:
        """The replica is unknown from now on. Its bit is used again after a sweep."""
        bit = self._slots.pop(replica_id, 0)
        if bit:
            del self._ids[bit]
            self._live &= ~bit
            self._dirty |= bit

    def add(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._held.mark(self._slots[replica_id], fingerprints)

    def remove(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._held.unmark(self._slots[replica_id], fingerprints)

    def expect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """A request on its way will put these blocks there: its siblings may count on them."""
        self._expected.mark(self._slots.get(replica_id, 0), fingerprints)

    def unexpect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._expected.unmark(self._slots.get(replica_id, 0), fingerprints)

    def hits(self, chain: Sequence[Fingerprint]) -> dict[str, int]:
        """replica id -> leading blocks of the chain held or expected there; no entry means none."""
        depths: dict[str, int] = {}
        here, step = 0, 1
        holders = self._holders(chain, 0)
        while holders:
            there = min(here + step, len(chain))
            remaining = holders & self._holders(chain, there)
            self._settle(chain, here, there, holders & ~remaining, depths)
            here, holders = there, remaining
            step *= 2
        return depths

    def held_by(self, replica_id: str) -> set[Fingerprint]:
        """All of one replica's blocks."""
        return set[Fingerprint]().union(*self.walk(replica_id))

    def walk(self, replica_id: str) -> Iterator[list[Fingerprint]]:
        """The same in parts, none of which takes long; together, all of the mirror is looked at."""
        return self._held.all_with(self._slots.get(replica_id, 0))

    def sweep(self) -> bool:
        """Cleans some of the blocks of given-up bits; False once there is nothing to clean."""
        if not self._dirty:
            return False
        if not self._unswept:
            self._unswept = TABLES
            self._sweeping = self._dirty
        self._unswept -= 1
        self._held.unmark_in(self._unswept, self._sweeping)
        self._expected.unmark_in(self._unswept, self._sweeping)
        if not self._unswept:
            self._dirty &= ~self._sweeping
        return True

    def _holders(self, chain: Sequence[Fingerprint], i: int) -> int:
        """The bits of the live replicas that hold, or will hold, block i."""
        if i >= len(chain):
            return 0
        fingerprint = chain[i]
        return (self._held.get(fingerprint) | self._expected.get(fingerprint)) & self._live

    def _settle(
        self, chain: Sequence[Fingerprint], low: int, high: int, lost: int, depths: dict[str, int]
    ) -> None:
        """Notes the depth of each replica in `lost`: it holds block `low` and not block `high`."""
        if not lost:
            return
        if high - low == 1:
            depths.update((self._ids[bit], high) for bit in _bits(lost))
            return
        middle = (low + high) // 2
        kept = lost & self._holders(chain, middle)
        self._settle(chain, low, middle, lost & ~kept, depths)
        self._settle(chain, middle, high, kept, depths)

    def _free_bit(self) -> int:
        used = self._live | self._dirty
        return ~used & (used + 1)


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
