"""Prefixes after which prompts diverge, and the replicas to which these prompts were sent."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from kvroute.blocks.fingerprint import Fingerprint

MAX_PREFIXES = 10_000  # prefixes with counts; beyond this, the least recently used is dropped
# Decay of a prefix's counts: a count falls to 1/e after this many further branches per replica.
DECAY_ROUNDS = 4.0
EMPTY_PREFIX = Fingerprint(0)  # key of prompts whose first block no replica has


class Branches:
    """Counts of branches. They are estimates, and placement works without them.

    A prompt is a branch of the longest prefix of it that any replica has cached.
    """

    def __init__(self) -> None:
        # Last block of a prefix -> replica id -> number of branches that went there, decayed.
        self._counts: OrderedDict[Fingerprint, dict[str, float]] = OrderedDict()

    def forks(self, prefix: Sequence[Fingerprint]) -> float:
        """Return the number of branches of the prefix. Older branches count less."""
        return sum(self._counts.get(_key(prefix), {}).values())

    def shares(self, prefix: Sequence[Fingerprint], fleet: Sequence[str]) -> list[float]:
        """Return each replica's number of branches divided by the mean over all replicas.

        If the prefix has no branches, return 1 for each replica.
        """
        counts = self._counts.get(_key(prefix), {})
        own = [counts.get(replica_id, 0.0) for replica_id in fleet]
        total = sum(own)
        return [len(own) * count / total for count in own] if total else [1.0] * len(own)

    def take(self, prefix: Sequence[Fingerprint], replica_id: str, fleet: Collection[str]) -> None:
        """Record that a branch of the prefix was sent to this replica."""
        decay = 1.0 - 1.0 / (DECAY_ROUNDS * len(fleet))
        before = self._counts.pop(_key(prefix), {})
        counts = {id_: decay * count for id_, count in before.items() if id_ in fleet}
        counts[replica_id] = counts.get(replica_id, 0.0) + 1.0
        self._counts[_key(prefix)] = counts
        if len(self._counts) > MAX_PREFIXES:
            self._counts.popitem(last=False)


def _key(prefix: Sequence[Fingerprint]) -> Fingerprint:
    return prefix[-1] if prefix else EMPTY_PREFIX
