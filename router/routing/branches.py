"""Which prefixes many prompts leave from, and which replicas their branches went to."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from replica.kvindex.fingerprint import Fingerprint

KNOWN_PREFIXES = 10_000  # the least recently left ones are forgotten
ROUNDS = 4.0  # of the fleet, for which a prefix's branches are remembered
START = Fingerprint(0)  # stands for no prefix at all: prompts whose first block nobody has


class Branches:
    """Counts of this router's own requests: hints, like all of its knowledge.

    A prompt leaves a prefix when that is the longest part of it that any replica has.
    """

    def __init__(self) -> None:
        self._taken: OrderedDict[Fingerprint, dict[str, float]] = OrderedDict()

    def forks(self, prefix: Sequence[Fingerprint]) -> float:
        """Requests that left this prefix, the latest counting most."""
        return sum(self._taken.get(_key(prefix), {}).values())

    def shares(self, prefix: Sequence[Fingerprint], fleet: Sequence[str]) -> list[float]:
        """Its branches that each replica took, over their mean; 1 while nobody took any."""
        taken = self._taken.get(_key(prefix), {})
        return relative([taken.get(replica_id, 0.0) for replica_id in fleet])

    def take(self, prefix: Sequence[Fingerprint], replica_id: str, fleet: Collection[str]) -> None:
        """A branch of the prefix went to that replica."""
        keep = 1.0 - 1.0 / (ROUNDS * len(fleet))
        before = self._taken.pop(_key(prefix), {})
        taken = {id_: keep * count for id_, count in before.items() if id_ in fleet}
        taken[replica_id] = taken.get(replica_id, 0.0) + 1.0
        self._taken[_key(prefix)] = taken
        if len(self._taken) > KNOWN_PREFIXES:
            self._taken.popitem(last=False)


def relative(amounts: Sequence[float]) -> list[float]:
    """Each one over the mean of all; 1 when all are nothing."""
    total = sum(amounts)
    return [len(amounts) * amount / total if total else 1.0 for amount in amounts]


def _key(prefix: Sequence[Fingerprint]) -> Fingerprint:
    return prefix[-1] if prefix else START
