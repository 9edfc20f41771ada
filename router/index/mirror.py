"""The router's copy of the index in memory: which replicas hold the leading blocks of a prompt.

A chain is the sequence of the fingerprints of a prompt's blocks. Each fingerprint maps to a bit
mask, in which each replica has a bit. A replica that holds block i of a chain also holds the blocks
before it, because engines evict the last block of a chain first. So galloping search and bisection
find the number of leading blocks on each replica: about ten dictionary reads for a prompt of a
thousand blocks.

A replica publishes the blocks of its slower tiers, such as host memory, under other fingerprints
(blocks/tiers.py). The mirror stores them like all others, and looks them up only on replicas that
have such tiers.
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
from kvroute.router.index.masks import TABLES, Masks

# Seconds after which the mirror has the blocks that an engine stored. The feed (feed.py) polls
# Redis twice in this time, so it also notices a change that it missed in the stream.
INDEX_DELAY_S = 2.0

# A function that returns a bit mask of the replicas that have block i of a chain.
Holders = Callable[[Sequence[Fingerprint], int], int]
# Number of blocks in each of the two sets of the history. A larger set would block the event loop
# for more than a few milliseconds when it grows or is freed.
GENERATION = 100_000


class Mirror:
    """The index of the fleet's cached blocks in this process.

    Each replica has a slot: one bit of all masks. When a replica clears its cache, it gets a new
    slot. So clearing takes constant time; a sweep clears the old bit in the masks later.

    While Redis is away, the mirror gets no changes. It then assumes that a replica caches the
    prompts that this router sends to it, and marks them in a second slot, the predicted slot.
    Blocks that are only in the first slot were used less recently. When the prompts in the
    predicted slot have as many blocks as the replica's cache, all other blocks must have been
    evicted. Then the predicted slot replaces the first one.
    """

    def __init__(self) -> None:
        self.is_fed = True  # the feed reads changes from Redis; False while Redis is away
        self._held = Masks()  # blocks that replicas have, as far as the mirror knows
        self._expected = Masks()  # blocks that requests compute, or have computed just before
        # Blocks of requests that ended, which the index may not have yet: the time of the end, the
        # replica, and the blocks that it computed; the oldest request first.
        self._computed: deque[tuple[float, str, Sequence[Fingerprint]]] = deque()
        self._history = EvictionHistory()
        self._slots: dict[str, int] = {}  # replica id -> bit of its slot
        # Replica id -> bit of its predicted slot. Replicas without one have no entry.
        self._predicted: dict[str, int] = {}
        # Replica id -> number of blocks in its latest predicted slot. The entry stays until the
        # replica joins again.
        self._predicted_blocks: dict[str, int] = {}
        self._ids: dict[int, str] = {}  # bit -> replica id
        self._live = 0  # mask of all slots in use; other bits of a mask are ignored
        self._tiered_ids: dict[Tier, set[str]] = {}  # slower tier -> ids of replicas that have it
        # Slower tier -> bits of the replicas that have it. A tier without replicas stays here.
        self._tiered: dict[Tier, int] = {}
        # The fingerprints of a block's copies in two tiers differ by XOR with one of these numbers.
        self._copy_marks: set[int] = set()
        self._dirty = 0  # mask of released bits that may still be set in some masks
        self._sweeping = 0  # mask of the released bits that the current sweep clears
        self._unswept = 0  # number of tables that the current sweep has not cleared yet

    def __len__(self) -> int:
        """Return the number of stored fingerprints, including those that a sweep will remove.

        The copy of a block in host memory counts as another block.
        """
        return len(self._held)

    @property
    def replica_ids(self) -> set[str]:
        return set(self._slots)

    def set_tiers(self, tiers: Mapping[str, Collection[Tier]]) -> None:
        """Set the slower tiers that each replica has.

        Args:
            tiers: replica id -> its tiers besides GPU memory.
        """
        ids: dict[Tier, set[str]] = {tier: set() for tier in self._tiered}
        for replica_id, replica_tiers in tiers.items():
            for tier in replica_tiers:
                ids.setdefault(tier, set()).add(replica_id)
        for tier, replica_ids in ids.items():
            if self._tiered_ids.get(tier, set()) != replica_ids:
                self._tiered_ids[tier] = replica_ids
                self._tiered[tier] = sum(map(self._bits, replica_ids))
        pairs = combinations((GPU, *self._tiered), 2)
        self._copy_marks = {first.mark ^ second.mark for first, second in pairs}

    def join(self, replica_id: str) -> None:
        """Add a replica without blocks, and forget any blocks that it had."""
        self.drop(replica_id)
        self._slots[replica_id] = self._allocate_bit(replica_id)

    def drop(self, replica_id: str) -> None:
        """Remove the replica. After a sweep, other replicas can use its bits."""
        self._release(self._slots.pop(replica_id, 0))
        self._release(self._predicted.pop(replica_id, 0))
        self._predicted_blocks.pop(replica_id, None)

    def load(self, replica_id: str, packed: bytes) -> Iterator[None]:
        """Replace the replica's blocks, in short steps. The iterator yields None after each step.

        Args:
            packed: fingerprints, as little-endian integers of 8 bytes.
        """
        self.join(replica_id)
        return self._held.fill(self._slots[replica_id], packed)

    def add(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Add blocks that the index reports, and remove the mark of `expect` from them.

        They do not need the mark any more, because the index will also report their eviction.
        """
        slot, added = self._slots[replica_id], [*fingerprints]
        self._held.mark(slot, added)
        self._expected.unmark(slot, added)

    def remove(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Remove blocks that the index reports as evicted."""
        self._add_to_history(self._held.unmark(self._slots[replica_id], fingerprints))

    def infer(self, replica_id: str, chain: Sequence[Fingerprint], *, capacity_blocks: int) -> None:
        """Assume that the replica caches the chain. Do this only while Redis is away.

        Args:
            chain: blocks of a prompt that this router sent to the replica.
            capacity_blocks: size of the replica's cache.
        """
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
        """Return the replicas for which `infer` marked blocks since they joined."""
        return set(self._predicted_blocks)

    def expect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Mark blocks that a running request will compute, so that they count as hits already."""
        self._expected.mark(self._bits(replica_id), fingerprints)

    def unexpect(self, replica_id: str, fingerprints: Iterable[Fingerprint]) -> None:
        """Remove the mark of `expect`."""
        self._expected.unmark(self._bits(replica_id), fingerprints)

    def record_computed(
        self, replica_id: str, fingerprints: Sequence[Fingerprint], now_s: float
    ) -> None:
        """After the end of a request, keep its blocks marked as expected for INDEX_DELAY_S.

        The next turn of the conversation may arrive before the index has these blocks.
        """
        if fingerprints:
            self._computed.append((now_s, replica_id, fingerprints))

    def forget_computed(self, now_s: float) -> None:
        """Remove the mark of `expect` from blocks that were computed INDEX_DELAY_S ago."""
        while self._computed and self._computed[0][0] <= now_s - INDEX_DELAY_S:
            _, replica_id, fingerprints = self._computed.popleft()
            self.unexpect(replica_id, fingerprints)

    def hits(
        self,
        chain: Sequence[Fingerprint],
        *,
        tiers: Sequence[Tier] = (),
        layout: Boundaries | None = None,
    ) -> dict[str, int]:
        """Return how many leading blocks of the chain each replica has, if it has any.

        Args:
            tiers: slower tiers whose blocks count as well as those in GPU memory. With tiers, the
                result has only replicas with one of these tiers, and expected blocks do not count.
                Without tiers, they do.
            layout: the rules for engines with several cache groups; None: all blocks before the end
                of a hit are needed.
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

    def first_group_hit(self, chain: Sequence[Fingerprint], boundaries: Boundaries) -> int:
        """Return the longest hit in the first cache group of any replica, in blocks."""
        return boundaries.first_group_hit(chain, lambda block: self._holders((block,), 0))

    def known_blocks(self, chain: Sequence[Fingerprint], *, at_least: int = 0) -> int:
        """Return how many leading blocks of the chain some replica holds or once held.

        Bisection is right although the eviction history is bounded: engines evict the last blocks
        of a chain first, and the history also forgets them first.

        Args:
            at_least: number of leading blocks that need no check, since a replica holds them.
        """
        blocks = range(len(chain))
        return bisect_left(
            blocks, True, lo=at_least, key=lambda index: not self.is_known(chain[index])
        )

    def is_known(self, fingerprint: Fingerprint) -> bool:
        """Return whether some replica holds the block or once held it, in any tier."""
        if self._is_or_was_held(fingerprint):
            return True
        return any(self._is_or_was_held(tier.fingerprint(fingerprint)) for tier in self._tiered)

    def is_held(self, replica_id: str, fingerprint: Fingerprint) -> bool:
        """Return whether the replica has the block now. Expected blocks do not count."""
        return bool(self._held.get(fingerprint) & self._bits(replica_id))

    def walk(self, replica_id: str) -> Iterator[list[Fingerprint]]:
        """Yield the replica's blocks in lists. Each step reads one table of the mirror."""
        return self._held.all_with(self._bits(replica_id))

    def sweep(self) -> bool:
        """Clear released bits in one table, and return whether there was anything to clear."""
        if not self._dirty:
            return False
        if not self._unswept:
            self._unswept = TABLES
            self._sweeping = self._dirty
        self._unswept -= 1
        self._add_to_history(self._held.unmark_in(self._unswept, self._sweeping))
        self._expected.unmark_in(self._unswept, self._sweeping)
        if not self._unswept:
            self._dirty &= ~self._sweeping
        return True

    def _holders(self, chain: Sequence[Fingerprint], i: int) -> int:
        """Return the bits of the replicas that hold block i, or that are expected to hold it."""
        if i >= len(chain):
            return 0
        fingerprint = chain[i]
        return (self._held.get(fingerprint) | self._expected.get(fingerprint)) & self._live

    def _holders_through(
        self, tiers: Sequence[Tier], replicas: int, chain: Sequence[Fingerprint], i: int
    ) -> int:
        """Return the bits of those `replicas` that hold block i in GPU memory or in these tiers."""
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
        depth, step = 0, 1
        holders = holders_of(chain, 0)
        while holders:
            next_depth = min(depth + step, len(chain))
            remaining = holders & holders_of(chain, next_depth)
            if remaining != holders:
                self._bisect(chain, holders_of, depth, next_depth, holders & ~remaining, depths)
            depth, holders = next_depth, remaining
            step *= 2
        return depths

    def _bisect(
        self,
        chain: Sequence[Fingerprint],
        holders_of: Holders,
        low: int,
        high: int,
        replicas: int,
        depths: dict[str, int],
    ) -> None:
        """Store in `depths` how many leading blocks each of the replicas has.

        All of the replicas have block `low`, and none has block `high`.
        """
        while high - low > 1:
            middle = (low + high) // 2
            holders = replicas & holders_of(chain, middle)
            if not holders:
                high = middle
                continue
            if holders != replicas:
                self._bisect(chain, holders_of, low, middle, replicas & ~holders, depths)
            replicas, low = holders, middle
        for bit in _bits(replicas):
            depths[self._ids[bit]] = high

    def _depths_at(
        self,
        chain: Sequence[Fingerprint],
        boundaries: Boundaries,
        holders_of: Holders,
        replicas: int,
    ) -> dict[str, int]:
        """Return the longest hit of each of the replicas, in blocks."""
        depths: dict[str, int] = {}
        hits = boundaries.hits(chain, lambda block: holders_of((block,), 0), replicas)
        for holders, depth in hits:
            for bit in _bits(holders):
                depths.setdefault(self._ids[bit], depth)
        return depths

    def _is_or_was_held(self, fingerprint: Fingerprint) -> bool:
        """Return whether some replica holds the block or once held it, in this tier."""
        return bool(self._held.get(fingerprint)) or fingerprint in self._history

    def _add_to_history(self, evicted: Sequence[Fingerprint]) -> None:
        """Add to the eviction history those of the blocks that no replica holds in any tier.

        A block that has a copy in another tier is added later, when that copy is evicted too. So
        each block is added once.

        Args:
            evicted: blocks that no replica holds any more in one tier.
        """
        if self._copy_marks:
            evicted = [block for block in evicted if not self._has_copy(block)]
        self._history.add(evicted)

    def _has_copy(self, fingerprint: Fingerprint) -> bool:
        """Return whether some replica holds the same block in another tier."""
        return any(self._held.get(Fingerprint(fingerprint ^ mark)) for mark in self._copy_marks)

    def _bits(self, replica_id: str) -> int:
        return self._slots.get(replica_id, 0) | self._predicted.get(replica_id, 0)

    def _allocate_bit(self, replica_id: str) -> int:
        """Return the lowest free bit, and give it to the replica."""
        used = self._live | self._dirty
        bit = ~used & (used + 1)
        self._ids[bit] = replica_id
        self._live |= bit
        for tier, replica_ids in self._tiered_ids.items():
            if replica_id in replica_ids:
                self._tiered[tier] |= bit
        return bit

    def _release(self, bit: int) -> None:
        """Take the bit out of use. A sweep clears it in the masks before it is used again."""
        self._ids.pop(bit, None)
        self._live &= ~bit
        for tier in self._tiered:
            self._tiered[tier] &= ~bit
        self._dirty |= bit


def _bits(mask: int) -> Iterator[int]:
    """Yield each bit of the mask as a mask of its own, the lowest bit first."""
    while mask:
        bit = mask & -mask
        yield bit
        mask ^= bit


def deepest(
    mirror: Mirror,
    chain: Sequence[Fingerprint],
    tier: Tier,
    replica_ids: Collection[str],
    end: int,
) -> tuple[int, list[str]]:
    """Return how many leading blocks some of the replicas have in one tier, and which of them.

    Bisection is enough, since a tier evicts the last blocks of a chain first.

    Args:
        tier: a slower tier.
        replica_ids: the replicas to look at.
        end: only this many leading blocks count.
    """
    replicas, held = sum(map(mirror._bits, replica_ids)), mirror._held

    def are_missing(index: int) -> bool:
        return not held.get(tier.fingerprint(chain[index])) & replicas

    blocks = bisect_left(range(end), True, key=are_missing)
    if not blocks:
        return 0, []
    holders = held.get(tier.fingerprint(chain[blocks - 1])) & replicas
    return blocks, [mirror._ids[bit] for bit in _bits(holders)]


class EvictionHistory:
    """The last evicted blocks: at least GENERATION of them, at most twice as many.

    They tell an evicted prefix from one that was never cached.
    """

    def __init__(self) -> None:
        self._recent: set[Fingerprint] = set()
        self._old: set[Fingerprint] = set()

    def __len__(self) -> int:
        return len(self._recent) + len(self._old)

    def __contains__(self, fingerprint: Fingerprint) -> bool:
        return fingerprint in self._recent or fingerprint in self._old

    def add(self, fingerprints: Sequence[Fingerprint]) -> None:
        begin = 0
        while begin < len(fingerprints):
            if len(self._recent) >= GENERATION:
                self._old, self._recent = self._recent, set()
            end = begin + GENERATION - len(self._recent)
            self._recent.update(fingerprints[begin:end])
            begin = end
