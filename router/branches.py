"""Which prefixes many prompts leave from, and whose turn it is to take a new conversation."""

from collections import OrderedDict
from collections.abc import Collection, Sequence

from replica.kvindex.fingerprint import Fingerprint

KNOWN_PREFIXES = 10_000  # the least recently left ones are forgotten


class Branches:
    """Counts of this router's own requests: hints, like all of its knowledge."""

    def __init__(self) -> None:
        self._forks: OrderedDict[Fingerprint, int] = OrderedDict()
        self._taken: dict[str, float] = {}  # replica id -> branches taken, the latest counting most

    def forks(self, prefix: Sequence[Fingerprint]) -> int:
        """Requests that left this prefix: had it as the longest that any replica knew."""
        return self._forks.get(prefix[-1], 0) if prefix else 0

    def leave(self, prefix: Sequence[Fingerprint]) -> None:
        if not prefix:
            return
        self._forks[prefix[-1]] = self._forks.pop(prefix[-1], 0) + 1
        if len(self._forks) > KNOWN_PREFIXES:
            self._forks.popitem(last=False)

    def share(self, replica_id: str) -> float:
        """Branches it took lately, over the fleet's mean; 1 when nobody took any."""
        total = sum(self._taken.values())
        return len(self._taken) * self._taken.get(replica_id, 0.0) / total if total else 1.0

    def take(self, replica_id: str, fleet: Collection[str]) -> None:
        """A branch went to that replica; one round of the fleet is remembered, roughly."""
        keep = 1.0 - 1.0 / max(2, len(fleet))
        self._taken = {member: keep * self._taken.get(member, 0.0) for member in fleet}
        self._taken[replica_id] = self._taken.get(replica_id, 0.0) + 1.0
