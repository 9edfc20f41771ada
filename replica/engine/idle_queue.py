"""One kind of idle blocks: how long they are kept beside other kinds."""

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from operator import itemgetter
from typing import NamedTuple

from kvroute.contract.keep import Keep

STEPS = 2  # kinds for each halving of the chance
MOST = 16  # kinds by chance: below 2 ** -(MOST / STEPS) all are one
STILL_S = (0.0, 15.0, 60.0, 300.0, 3600.0, 86400.0)  # promises are rounded up to one of these
TENANTS = 16  # classes of tenants
LEARNED = -1  # in the place of a tenant's class: nobody has promised, the wait is learned

Idle = tuple[int, float]  # a block, and since when it is idle


class Kind(NamedTuple):
    """What is equal for all blocks of a queue."""

    halvings: int  # of the chance, times STEPS
    still: int = 0  # place in STILL_S
    tenant: int = 0  # class of who has promised, or LEARNED


ENDED = Kind(MOST + 1)


def kind_of(keep: Keep) -> Kind:
    if keep.chance <= 0.0:
        return ENDED
    halvings = round(min(MOST, max(0.0, -STEPS * math.log2(keep.chance))))
    still = min(bisect_left(STILL_S, keep.still_s), len(STILL_S) - 1)
    if not still:
        return Kind(halvings)
    return Kind(halvings, still, keep.tenant % TENANTS if keep.is_promised else LEARNED)


def better(one: Kind, other: Kind) -> Kind:
    """What a block is kept as that both want: never less than either of them says. Of two equal
    waits, the one that is promised."""
    if ENDED in (one, other):
        return other if one == ENDED else one
    promise = max(one, other, key=lambda kind: (kind.still, kind.tenant))
    return Kind(min(one.halvings, other.halvings), promise.still, promise.tenant)


class IdleQueue:
    """Idle blocks of one kind."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.blocks: OrderedDict[int, float] = OrderedDict()  # block -> idle since, in this order
        self.still_s = STILL_S[kind.still]
        self.pace = math.inf if kind == ENDED else 2.0 ** (kind.halvings / STEPS)
        self.why = _why(kind)

    def age(self, since_s: float, now_s: float, still_s: float) -> float:
        """What the order compares, in seconds; below 0: of a promise that is not over."""
        aged_s = now_s - since_s - still_s
        if self.pace == math.inf:
            return math.inf
        return aged_s * self.pace if aged_s > 0.0 else aged_s

    def since_s(self, age: float, now_s: float, still_s: float) -> float:
        """Since when blocks of that age are idle."""
        if self.pace == math.inf:
            return math.inf
        return now_s - still_s - (age / self.pace if age > 0.0 else age)

    def aged(self, now_s: float) -> Iterator[tuple[float, int]]:
        """Its blocks with their ages, the largest first."""
        for block, since_s in self.blocks.items():
            yield self.age(since_s, now_s, self.still_s), block

    def take_until(self, limit_s: float) -> list[Idle]:
        """Those that are idle since then or longer; it has them no more."""
        taken: list[Idle] = []
        for idle in self.blocks.items():
            if idle[1] > limit_s:
                break
            taken.append(idle)
        for block, _ in taken:
            del self.blocks[block]
        return taken

    def insert(self, added: Iterable[Idle]) -> None:
        """Puts blocks at their places, which are near the end: all newer ones are moved. What has
        ended is of one age, and comes behind what has ended before."""
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
    """Unlikely: a chance below a half, as nearly as kinds can tell: below 0.42. The next kind's
    are 0.42 to 0.59."""
    if kind == ENDED:
        return "ended"
    if kind.still and kind.tenant != LEARNED:
        return "promised"
    return "unlikely" if kind.halvings > STEPS else "usual"
