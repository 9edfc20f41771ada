"""Finds degraded replicas: they get requests, but the router ignores their caches.

A replica is degraded for one of these reasons:

- Its record in Redis cannot be read, because it runs another version.
- It uses another fingerprint scheme. Then its blocks never match those of a prompt.
- It has another tokenizer or chat template than this router, which tokenizes the prompts.
- Its engine has a cache layout for which the router cannot compute hits.

The first three happen while a new version is rolled out, or if a node has different model files.
"""

import logging
from collections.abc import Iterable, Mapping
from types import MappingProxyType

from kvroute.contract.identity import Identity
from kvroute.contract.records import ReplicaRecord

log = logging.getLogger("kvroute.handshake")

# Name of each compared field of an identity -> its name in messages.
WORDS = {name: name.replace("_", " ") for name in Identity.__struct_fields__ if name != "variants"}
NO_REASONS: Mapping[str, str] = MappingProxyType({})  # no replica has this problem
REMEDY = "; restart it with the routers' model files and settings"  # end of the log line


class Handshake:
    """Compares the replicas with this router.

    Args:
        identity: the router's values that must be equal in the replicas, such as the digest of its
            tokenizer. None: only unreadable records and unknown cache layouts are reported.
    """

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self.degraded: Mapping[str, str] = {}  # replica id -> why it is degraded

    def check(
        self,
        records: Iterable[ReplicaRecord],
        unreadable: Mapping[str, str] = NO_REASONS,
        unknown: Mapping[str, str] = NO_REASONS,
    ) -> None:
        """Update `degraded`, and log replicas that were not degraded before.

        Args:
            records: the records of all replicas that can be read.
            unreadable: replica id -> why its record cannot be read.
            unknown: replica id -> why its hits cannot be computed.
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
    """Describe how a replica's identity differs from the router's; return "" if it does not.

    Example: "its block size is 16, the router's 32". A replica without an identity counts as equal.
    A variant of the model that only one of them has is no difference, because the router sends
    requests for a variant only to replicas that have it.
    """
    if theirs is None:
        return ""
    reasons: list[str] = []
    for name, words in WORDS.items():
        mine, its = getattr(ours, name), getattr(theirs, name)
        if its != mine:
            reasons.append(f"its {words} is {its or 'empty'}, the router's {mine or 'empty'}")
    for name, mine in ours.variants.items():
        its = theirs.variants.get(name, mine)
        if its != mine:
            reasons.append(f"its LoRA adapter {name} is {its or 'empty'}, the router's {mine}")
    return "; ".join(reasons)
