"""Knows in memory which replicas hold a prompt's leading blocks.

Each fingerprint maps to a bit mask of replica slots. A replica that holds block i of a chain holds
the blocks before it, because engines evict leaves first. So galloping and bisection find the length
of each replica's match: about ten dictionary reads for a prompt of a thousand blocks.

A replica announces the blocks of its slower tiers under other fingerprints (blocks/tiers.py). The
mirror keeps them like all others, and looks for them only on replicas that have such tiers.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial, reduce
from itertools import combinations
from operator import or_

from kvroute.blocks.fingerprint import Fingerprint
from kvroute.blocks.tiers import GPU, Tier
from kvroute.router.index.boundaries import Boundaries
from kvroute.router.index.eviction_history import EvictionHistory
from kvroute.router.index.masks import TABLES, Masks

# After that time the index has what an engine stored: within two of the feed's polls, it has
# noticed any change that it missed.
TOLD_S = 2.0

Holders = Callable[[Sequence[Fingerprint], int], int]  # the bits of those that have block i


class Mirror:
    """The fleet's index in this process. A slot is a bit; a replica that clears gets a new one.

    While the index announces nothing, each replica has a second slot, the predicted slot, for the
    chains that were sent there since. Blocks that are only in the old slot were used less recently.
    So when the chains have as many blocks as the replica's cache, the others must be evicted. Then
    the predicted slot replaces the old one.
    """

    def __init__(self) -> None:
        self.is_fed = True  # the index announces changes
        self._held = Masks()
        self._expected = Masks()
        # When requests ended, where, and the blocks that they computed; the oldest first.
        self._computed: deque[tuple[float, str, Sequence[Fingerprint]]] = deque()
        self._history = EvictionHistory()
        self._slots: dict[str, int] = {}  # replica id -> its bit
        self._predicted: dict[str, int] = {}  # replica id -> bit of its predicted slot, if any
        self._predicted_blocks: dict[str, int] = {}  # replica id -> blocks in its last such slot
        self._ids: dict[int, str] = {}  # bit -> replica id
        self._live = 0  # bits in use; all other bits of a mask are ignored
        self._tiered_ids: dict[Tier, set[str]] = {}  # replicas that have a slower tier
        self._tiered: dict[Tier, int] = {}  # their bits; tiers of which none is left stay here
        self._copy_marks: set[int] = (
            set()
        )  # bits in which the fingerprints of one block's copies differ
        self._dirty = 0  # released bits, perhaps still set in some masks
        self._sweeping = 0  # released bits that the current sweep clears
        self._unswept = 0  # tables that the current sweep has still to clear

    def __len__(self) -> int:
        """Return the number of fingerprints that live replicas hold or that are not yet swept.

        A block in host memory has a fingerprint of its own.
        """
        return len(self._held)

    @property
    def replica_ids(self) -> set[str]:
        return set(self._slots)

    def set_tiers(self, tiers: Mapping[str, Collection[Tier]]) -> None:
        """Take over which replicas have slower tiers, by replica id."""
        ids: dict[Tier, set[str]] = {tier: set() for tier in self._tiered}
        for replica_id, known in tiers.items():
            for tier in known:
                ids.setdefault(tier, set()).add(replica_id)
        for tier, replica_ids in ids.items():
            if self._tiered_ids.get(tier, set()) != replica_ids:
                self._tiered_ids[tier] = replica_ids
                self._tiered[tier] = sum(map(self._bits, replica_ids))
        pairs = combinations((GPU, *self._tiered), 2)
        self._copy_marks = {one.mark ^ other.mark for one, other in pairs}

    def join(self, replica_id: str) -> None:
        """Add a replica without blocks; all earlier knowledge of it is dropped."""
        self.drop(replica_id)
        self._slots[replica_id] = self._allocate_bit(replica_id)

    def drop(self, replica_id: str) -> None:
        """Remove the replica. Its bits can be reused after a sweep."""
        self._release(self._slots.pop(replica_id, 0))
        self._release(self._predicted.pop(replica_id, 0))
        self._predicted_blocks.pop(replica_id, None)

    def load(self, replica_id: str, packed: bytes) -> Iterator[None]:
        """Replace the replica's blocks in short steps, one for each value that is yielded."""
        self.join(replica_id)
        return self._held.fill(self._slots[replica_id], packed)

    def add(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Take over what the index tells; from now on, it also tells when they are gone."""
        slot, members = self._slots[replica_id], [*fingerprints]
        self._held.mark(slot, members)
        self._expected.unmark(slot, members)

    def remove(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._remember(self._held.unmark(self._slots[replica_id], fingerprints))

    def infer(self, replica_id: str, chain: Sequence[Fingerprint], *, capacity_blocks: int) -> None:
        """Mark the chain as held by the replica, while the mirror gets no changes from Redis."""
        if self.is_fed or replica_id not in self._slots:
            return
        if replica_id not in self._predicted:
            self._predicted[replica_id] = self._allocate_bit(replica_id)
            self._predicted_blocks[replica_id] = 0
        bit = self._predicted[replica_id]
        new = [fingerprint for fingerprint in chain if not self._held.get(fingerprint) & bit]
        self._held.mark(bit, new)
        self._predicted_blocks[replica_id] += len(new)
        if self._predicted_blocks[replica_id] >= capacity_blocks:
            self._release(self._slots[replica_id])
            self._slots[replica_id] = self._predicted.pop(replica_id)

    @property
    def inferred(self) -> set[str]:
        """Return the replicas for which something was inferred since they joined."""
        return set(self._predicted_blocks)

    def expect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Mark blocks that a request in flight will add, for other requests to rely on."""
        self._expected.mark(self._bits(replica_id), fingerprints)

    def unexpect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        self._expected.unmark(self._bits(replica_id), fingerprints)

    def computed(self, replica_id: str, fingerprints: Sequence[Fingerprint], now_s: float) -> None:
        """Expect the blocks of a request that has ended until the index must have them.

        The next turn of its conversation may come sooner than that.
        """
        if fingerprints:
            self._computed.append((now_s, replica_id, fingerprints))

    def forget_computed(self, now_s: float) -> None:
        """Expect no longer the blocks that the index must have by now."""
        while self._computed and self._computed[0][0] <= now_s - TOLD_S:
            _, replica_id, fingerprints = self._computed.popleft()
            self.unexpect(replica_id, fingerprints)

    def hits(
        self,
        chain: Sequence[Fingerprint],
        *,
        tiers: Sequence[Tier] = (),
        layout: Boundaries | None = None,
    ) -> dict[str, int]:
        """Return how many leading blocks of the chain each replica has; no entry: none.

        Args:
            tiers: slower tiers whose blocks count too. The result then has only replicas with one
                of these tiers, and only blocks that they hold; else expected blocks count as well.
            layout: the rules of engines with several cache groups.
        """
        holders_of, replicas = self._holders, self._live
        if tiers:
            replicas = reduce(or_, [self._tiered.get(tier, 0) for tier in tiers])
            holders_of = partial(self._holders_through, tiers, replicas)
        if not replicas:
            return {}
        if layout is not None:
            return self._depths_at(chain, layout, holders_of, replicas)
        return self._depths(chain, holders_of)

    def in_first_group(self, chain: Sequence[Fingerprint], boundaries: Boundaries) -> int:
        """Return how much of the chain some replica's first cache group has, in blocks."""
        return boundaries.in_first(chain, lambda each: self._holders((each,), 0))

    def known(self, chain: Sequence[Fingerprint], *, at_least: int = 0) -> int:
        """Return the leading blocks of the chain that some replica holds or once held.

        The eviction history is bounded: of a chain's blocks, those that were evicted first also
        leave it first.
        """
        blocks = range(len(chain))
        return bisect_left(blocks, True, lo=at_least, key=lambda i: not self.is_known(chain[i]))

    def is_known(self, fingerprint: Fingerprint) -> bool:
        """Return whether some replica holds the block, or once held it, in any tier."""
        if self._was(fingerprint):
            return True
        return any(self._was(tier.fingerprint(fingerprint)) for tier in self._tiered)

    def is_held(self, replica_id: str, fingerprint: Fingerprint) -> bool:
        """Return whether the replica has the block; False: it may be expected there."""
        return bool(self._held.get(fingerprint) & self._bits(replica_id))

    def walk(self, replica_id: str) -> Iterator[list[Fingerprint]]:
        """Yield the replica's blocks in short parts; together they read the whole mirror."""
        return self._held.all_with(self._bits(replica_id))

    def sweep(self) -> bool:
        """Clear released bits in one table, and return whether there was anything to clear."""
        if not self._dirty:
            return False
        if not self._unswept:
            self._unswept = TABLES
            self._sweeping = self._dirty
        self._unswept -= 1
        self._remember(self._held.unmark_in(self._unswept, self._sweeping))
        self._expected.unmark_in(self._unswept, self._sweeping)
        if not self._unswept:
            self._dirty &= ~self._sweeping
        return True

    def _holders(self, chain: Sequence[Fingerprint], i: int) -> int:
        """Return the bits of the live replicas that hold, or will hold, block i."""
        if i >= len(chain):
            return 0
        fingerprint = chain[i]
        return (self._held.get(fingerprint) | self._expected.get(fingerprint)) & self._live

    def _holders_through(
        self, tiers: Sequence[Tier], replicas: int, chain: Sequence[Fingerprint], i: int
    ) -> int:
        """Return which of the replicas hold block i in GPU memory or these tiers, as bits."""
        if i >= len(chain):
            return 0
        held, fingerprint = self._held, chain[i]
        holders = held.get(fingerprint)
        for tier in tiers:
            holders |= held.get(tier.fingerprint(fingerprint))
        return holders & replicas

    def _depths(self, chain: Sequence[Fingerprint], holders_of: Holders) -> dict[str, int]:
        """Return the number of leading blocks that each replica has, if it has any."""
        depths: dict[str, int] = {}
        here, step = 0, 1
        holders = holders_of(chain, 0)
        while holders:
            there = min(here + step, len(chain))
            remaining = holders & holders_of(chain, there)
            if remaining != holders:
                self._settle(chain, holders_of, here, there, holders & ~remaining, depths)
            here, holders = there, remaining
            step *= 2
        return depths

    def _settle(
        self,
        chain: Sequence[Fingerprint],
        holders_of: Holders,
        low: int,
        high: int,
        lost: int,
        depths: dict[str, int],
    ) -> None:
        """Find the depth of each replica in `lost`, which has block `low` but not block `high`."""
        while high - low > 1:
            middle = (low + high) // 2
            kept = lost & holders_of(chain, middle)
            if not kept:
                high = middle
                continue
            if kept != lost:
                self._settle(chain, holders_of, low, middle, lost & ~kept, depths)
            lost, low = kept, middle
        for bit in _bits(lost):
            depths[self._ids[bit]] = high

    def _depths_at(
        self,
        chain: Sequence[Fingerprint],
        boundaries: Boundaries,
        holders_of: Holders,
        replicas: int,
    ) -> dict[str, int]:
        """Return the deepest boundary that each of the replicas can serve."""
        depths: dict[str, int] = {}
        for able, depth in boundaries.hits(chain, lambda each: holders_of((each,), 0), replicas):
            for bit in _bits(able):
                depths.setdefault(self._ids[bit], depth)
        return depths

    def _was(self, member: Fingerprint) -> bool:
        """Return whether some replica holds the block or once held it."""
        return bool(self._held.get(member)) or member in self._history

    def _remember(self, gone: Sequence[Fingerprint]) -> None:
        """Add blocks that have left a tier of the last replica to the eviction history.

        A block of which some other tier has a copy is not gone. It comes here again when that copy
        goes, so each block takes one place of the history.
        """
        if self._copy_marks:
            gone = [each for each in gone if not self._has_copy(each)]
        self._history.add(gone)

    def _has_copy(self, member: Fingerprint) -> bool:
        """Return whether some replica holds the same block in another tier."""
        return any(self._held.get(Fingerprint(member ^ mark)) for mark in self._copy_marks)

    def _bits(self, replica_id: str) -> int:
        return self._slots.get(replica_id, 0) | self._predicted.get(replica_id, 0)

    def _allocate_bit(self, replica_id: str) -> int:
        used = self._live | self._dirty
        bit = ~used & (used + 1)
        self._ids[bit] = replica_id
        self._live |= bit
        for tier, replica_ids in self._tiered_ids.items():
            if replica_id in replica_ids:
                self._tiered[tier] |= bit
        return bit

    def _release(self, bit: int) -> None:
        """Yield the blocks of one replica in parts, each of which takes a short time."""
        self._ids.pop(bit, None)
        self._live &= ~bit
        for tier in self._tiered:
            self._tiered[tier] &= ~bit
        self._dirty |= bit


def _bits(mask: int) -> Iterator[int]:
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit
