"""A queue of idle blocks of one kind, and the ages by which blocks of different kinds compare."""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from kvroute.contract.keep import Keep

STEPS = 2  # number of kinds for each halving of the chance of reuse
MOST = 16  # number of kinds by chance; all chances below 2 ** -(MOST / STEPS) are one kind
STILL_S = (0.0, 15.0, 60.0, 300.0, 3600.0, 86400.0)  # retention times are rounded up to these
TENANTS = 16  # number of classes of tenants
LEARNED = -1  # value of Kind.tenant if no client promised the retention time: it was learned

Idle = tuple[int, float]  # a block, and the time since which it is idle


class Kind(NamedTuple):
    """The properties that all blocks of a queue have in common."""

    halvings: int  # -STEPS * log2(chance of reuse), rounded; MOST + 1 for ended sessions
    still: int = 0  # index in STILL_S of the retention time
    tenant: int = 0  # class of the tenant that promised the retention time, or LEARNED


ENDED = Kind(MOST + 1)


def kind_of(keep: Keep) -> Kind:
    """Return the kind of blocks with this retention hint."""
    if keep.chance <= 0.0:
        return ENDED
    halvings = round(min(MOST, max(0.0, -STEPS * math.log2(keep.chance))))
    still = min(bisect_left(STILL_S, keep.still_s), len(STILL_S) - 1)
    if not still:
        return Kind(halvings)
    return Kind(halvings, still, keep.tenant % TENANTS if keep.is_promised else LEARNED)


def better(one: Kind, other: Kind) -> Kind:
    """Return the kind of a block that has both kinds: it is retained at least as long as with each.

    Of two equal retention times, a promised one is preferred to a learned one.
    """
    if ENDED in (one, other):
        return other if one == ENDED else one
    promise = max(one, other, key=lambda kind: (kind.still, kind.tenant))
    return Kind(min(one.halvings, other.halvings), promise.still, promise.tenant)


class IdleQueue:
    """Idle blocks of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        # Block -> time since which it is idle, in the order of these times.
        self.blocks: OrderedDict[int, float] = OrderedDict()
        self.still_s = STILL_S[kind.still]
        self.pace = math.inf if kind == ENDED else 2.0 ** (kind.halvings / STEPS)
        self.why = _why(kind)

    def age(self, since_s: float, now_s: float, still_s: float) -> float:
        """Return a block's age, by which blocks of all queues are ordered.

        This is (idle time - retention time) / chance, or below 0 during the retention time.
        """
        aged_s = now_s - since_s - still_s
        if self.pace == math.inf:
            return math.inf
        return aged_s * self.pace if aged_s > 0.0 else aged_s

    def since_s(self, age: float, now_s: float, still_s: float) -> float:
        """Return the time since which blocks of this age are idle."""
        if self.pace == math.inf:
            return math.inf
        return now_s - still_s - (age / self.pace if age > 0.0 else age)

    def aged(self, now_s: float) -> Iterator[tuple[float, int]]:
        """Yield the blocks with their ages, the oldest first."""
        for block, since_s in self.blocks.items():
            yield self.age(since_s, now_s, self.still_s), block

    def take_until(self, limit_s: float) -> list[Idle]:
        """Remove and return the blocks that have been idle since `limit_s` or longer."""
        taken: list[Idle] = []
        for idle in self.blocks.items():
            if idle[1] > limit_s:
                break
            taken.append(idle)
        for block, _ in taken:
            del self.blocks[block]
        return taken

    def insert(self, added: Iterable[Idle]) -> None:
        """Insert blocks at their places, which are near the end: all newer blocks are moved.

        Blocks of ended sessions all have the same age; new ones are appended.
        """
        if self.kind == ENDED:
            last_s = next(reversed(self.blocks.values()), -math.inf)
            for block, since_s in added:
                self.blocks[block] = last_s = max(last_s, since_s)
            return
        added = sorted(added, key=itemgetter(1))
        newer: list[Idle] = []
        while self.blocks and next(reversed(self.blocks.values())) > added[0][1]:
            newer.append(self.blocks.popitem())
        if newer:
            added = sorted(added + newer[::-1], key=itemgetter(1))
        for block, since_s in added:
            self.blocks[block] = since_s


def _why(kind: Kind) -> str:
    """Return the reason for the eviction of such blocks, as in Evictions.

    "unlikely" means a chance below 0.42. It cannot mean exactly below a half, because one kind has
    all chances from 0.42 to 0.59.
    """
    if kind == ENDED:
        return "ended"
    if kind.still and kind.tenant != LEARNED:
        return "promised"
    return "unlikely" if kind.halvings > STEPS else "usual"
