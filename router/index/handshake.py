"""Degraded replicas, which differ from this router, get requests but no credit for their caches.

A replica whose record cannot be read runs another version. A replica with another fingerprint
scheme would never have a hit, without a visible reason. A replica with another tokenizer or chat
template does not run the model that the prompts are made for. All of this happens during the
rollout of a new version, or when one node has other files than the rest. And an engine may cache
layers of a kind whose hits are not known.
"""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvroute.contract.identity import Identity
from kvroute.contract.records import ReplicaRecord

log = logging.getLogger("kvroute.handshake")

WORDS = {name: name.replace("_", " ") for name in Identity.__struct_fields__ if name != "adapters"}
NONE: Mapping[str, str] = MappingProxyType({})
REMEDY = "; restart it with the routers' model files and settings"


class Handshake:
    """Without an identity to compare with, only unreadable records make a replica degraded."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self.degraded: Mapping[str, str] = {}  # replica id -> why

    def check(
        self,
        records: Iterable[ReplicaRecord],
        unreadable: Mapping[str, str] = NONE,
        unknown: Mapping[str, str] = NONE,
    ) -> None:
        """Find the degraded replicas among the current ones, and log new ones.

        Args:
            unreadable: replica -> why its record cannot be read.
            unknown: replica -> why its hits cannot be computed.
        """
        degraded = {
            replica_id: f"its record cannot be read: {reason}"
            for replica_id, reason in unreadable.items()
        }
        degraded.update(unknown)
        if self._identity is not None:
            for record in records:
                if reason := differences(self._identity, record.identity):
                    degraded.setdefault(record.id, reason)
        for replica_id in degraded.keys() - self.degraded.keys():
            log.warning(
                "replica %s is DEGRADED, its cache is ignored: %s%s",
                replica_id,
                degraded[replica_id],
                "" if replica_id in unknown else REMEDY,
            )
        self.degraded = degraded


def differences(ours: Identity, theirs: Identity | None) -> str:
    """Describe how a replica's identity differs; an empty string: it does not.

    Example: "its block size is 16, the router's 32". A replica without an identity counts as equal.
    So does a LoRA adapter that only one side has: its requests go to other replicas.
    """
    if theirs is None:
        return ""
    found = []
    for name, words in WORDS.items():
        mine, its = getattr(ours, name), getattr(theirs, name)
        if its != mine:
            found.append(f"its {words} is {its or 'empty'}, the router's {mine or 'empty'}")
    for name, mine in ours.adapters.items():
        its = theirs.adapters.get(name, mine)
        if its != mine:
            found.append(f"its LoRA adapter {name} is {its or 'empty'}, the router's {mine}")
    return "; ".join(found)
