"""Which replicas hold a prompt's leading blocks, answered from memory alone.

Each fingerprint maps to a bit mask of replica slots. A replica that holds block i of a chain holds
the blocks before it, because engines evict leaves first; so how far each replica's match goes is
found by galloping and bisection, in about ten dictionary reads for a prompt of a thousand blocks.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence

from replica.kvindex.fingerprint import Fingerprint
from router.routing.gone import Gone
from router.routing.masks import TABLES, Masks


class Mirror:
    """The fleet's index in this process. A slot is a bit; a replica that clears gets a new one.

    While nothing announces what replicas hold, each has a second, young slot, for the chains that
    were sent there since. Once these are as many blocks as its cache has, what is in the old slot
    alone was used less recently than all of them, and is gone: the young slot is the old one then.
    """

    def __init__(self) -> None:
        self.is_fed = True  # with what the index announces
        self._held = Masks()
        self._expected = Masks()
        self._gone = Gone()
        self._slots: dict[str, int] = {}  # replica id -> its bit
        self._young: dict[str, int] = {}  # replica id -> its second bit, if it has one
        self._young_blocks: dict[str, int] = {}  # replica id -> how many have the last such bit
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
        self._slots[replica_id] = self._take_bit(replica_id)

    def drop(self, replica_id: str) -> None:
        """The replica is unknown from now on. Its bit is used again after a sweep."""
        self._give_up(self._slots.pop(replica_id, 0))
        self._give_up(self._young.pop(replica_id, 0))
        self._young_blocks.pop(replica_id, None)

    def load(self, replica_id: str, packed: bytes) -> Iterator[None]:
        """The replica holds these blocks and no others; true once the iterator's end is reached,
        and each step to there is short."""
        self.join(replica_id)
        return self._held.fill(self._slots[replica_id], packed)

    def add(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._held.mark(self._slots[replica_id], fingerprints)

    def remove(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._gone.add(self._held.unmark(self._slots[replica_id], fingerprints))

    def presume(
        self, replica_id: str, chain: Sequence[Fingerprint], *, capacity_blocks: int
    ) -> None:
        """The replica holds this chain now, as nobody will announce while the mirror is not fed."""
        if self.is_fed or replica_id not in self._slots:
            return
        if replica_id not in self._young:
            self._young[replica_id] = self._take_bit(replica_id)
            self._young_blocks[replica_id] = 0
        bit = self._young[replica_id]
        new = [fingerprint for fingerprint in chain if not self._held.get(fingerprint) & bit]
        self._held.mark(bit, new)
        self._young_blocks[replica_id] += len(new)
        if self._young_blocks[replica_id] >= capacity_blocks:
            self._give_up(self._slots[replica_id])
            self._slots[replica_id] = self._young.pop(replica_id)

    @property
    def presumed(self) -> set[str]:
        """Replicas of which anything was presumed since they joined."""
        return set(self._young_blocks)

    def expect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """A request on its way will put these blocks there: its siblings may count on them."""
        self._expected.mark(self._bits(replica_id), fingerprints)

    def unexpect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._expected.unmark(self._bits(replica_id), fingerprints)

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

    def known(self, chain: Sequence[Fingerprint], *, at_least: int = 0) -> int:
        """Leading blocks of the chain that some replica holds or once held, as far as that is
        remembered; of a chain, what is evicted first is forgotten first."""

        def is_new(i: int) -> bool:
            return not (self._held.get(chain[i]) or chain[i] in self._gone)

        return bisect_left(range(len(chain)), True, lo=at_least, key=is_new)

    def held_by(self, replica_id: str) -> set[Fingerprint]:
        """All of one replica's blocks."""
        return set[Fingerprint]().union(*self.walk(replica_id))

    def walk(self, replica_id: str) -> Iterator[list[Fingerprint]]:
        """The same in parts, none of which takes long; together, all of the mirror is looked at."""
        return self._held.all_with(self._bits(replica_id))

    def sweep(self) -> bool:
        """Cleans some of the blocks of given-up bits; False once there is nothing to clean."""
        if not self._dirty:
            return False
        if not self._unswept:
            self._unswept = TABLES
            self._sweeping = self._dirty
        self._unswept -= 1
        self._gone.add(self._held.unmark_in(self._unswept, self._sweeping))
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

    def _bits(self, replica_id: str) -> int:
        return self._slots.get(replica_id, 0) | self._young.get(replica_id, 0)

    def _take_bit(self, replica_id: str) -> int:
        used = self._live | self._dirty
        bit = ~used & (used + 1)
        self._ids[bit] = replica_id
        self._live |= bit
        return bit

    def _give_up(self, bit: int) -> None:
        """It is used again after a sweep."""
        self._ids.pop(bit, None)
        self._live &= ~bit
        self._dirty |= bit


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
