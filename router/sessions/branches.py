"""At which prefixes prompts diverge, and which replicas the branches went to."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvroute.blocks.fingerprint import Fingerprint

KNOWN_PREFIXES = 10_000  # more are dropped, the least recently used first
ROUNDS = 4.0  # a prefix's branches decay over this many branches for each replica of the fleet
START = Fingerprint(0)  # the empty prefix: prompts whose first block no replica has


class Branches:
    """Counts branches: hints only, like all of a router's knowledge.

    A prompt branches off at a prefix if that is the longest part of it that any replica has.
    """

    def __init__(self) -> None:
        self._taken: OrderedDict[Fingerprint, dict[str, float]] = OrderedDict()

    def forks(self, prefix: Sequence[Fingerprint]) -> float:
        """Return the number of requests that branched off at this prefix; new ones weigh more."""
        return sum(self._taken.get(_key(prefix), {}).values())

    def shares(self, prefix: Sequence[Fingerprint], fleet: Sequence[str]) -> list[float]:
        """Return each replica's branches of the prefix over their mean; 1 if there are none."""
        taken = self._taken.get(_key(prefix), {})
        return relative([taken.get(replica_id, 0.0) for replica_id in fleet])

    def take(self, prefix: Sequence[Fingerprint], replica_id: str, fleet: Collection[str]) -> None:
        """Record that a branch of the prefix went to this replica."""
        keep = 1.0 - 1.0 / (ROUNDS * len(fleet))
        before = self._taken.pop(_key(prefix), {})
        taken = {id_: keep * count for id_, count in before.items() if id_ in fleet}
        taken[replica_id] = taken.get(replica_id, 0.0) + 1.0
        self._taken[_key(prefix)] = taken
        if len(self._taken) > KNOWN_PREFIXES:
            self._taken.popitem(last=False)


def relative(amounts: Sequence[float]) -> list[float]:
    """Each amount over the mean of all; 1 when all are zero."""
    total, count = sum(amounts), len(amounts)
    if not total:
        return [1.0] * count
    return [count * amount / total for amount in amounts]


def _key(prefix: Sequence[Fingerprint]) -> Fingerprint:
    return prefix[-1] if prefix else START
