"""Replicas that this router does not understand: they get work, and no credit for their caches.

One whose fingerprints are made otherwise would never have a hit, and nobody would know why. One
with another tokenizer or chat template is not the model that its prompts were written for. Both
happen while a new version is rolled out, or when a node has other files than the rest.
"""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any

from replica.identity import Identity
from replica.kvindex.index import ReplicaRecord

log = logging.getLogger("kvroute.handshake")

WORDS = {
    field.name: field.name.replace("_", " ")
    for field in fields(Identity)
    if field.name != "adapters"
}


class Handshake:
    """Without an identity to compare with, all replicas are understood."""

    def __init__(self, identity: Identity | None = None) -> None:
        self._identity = identity
        self.degraded: Mapping[str, str] = {}  # replica id -> why

    def look(self, records: Iterable[ReplicaRecord]) -> None:
        """These are the replicas now; what changed is logged."""
        if self._identity is None:
            return
        reasons = {record.id: differences(self._identity, record.facts) for record in records}
        degraded = {replica_id: reason for replica_id, reason in reasons.items() if reason}
        for replica_id in degraded.keys() - self.degraded.keys():
            log.warning(
                "replica %s is DEGRADED, nothing that it has cached counts: %s; restart it with "
                "the routers' model files and settings",
                replica_id,
                degraded[replica_id],
            )
        self.degraded = degraded


def differences(ours: Identity, facts: Mapping[str, Any]) -> str:
    """In words, such as "its block size is 16, the router's 32"; empty where there are none. What a
    replica does not say counts as equal, and so does a LoRA adapter that only one of them has: its
    requests go elsewhere."""
    found = []
    for name, words in WORDS.items():
        mine, its = getattr(ours, name), facts.get(name)
        if its is not None and its != mine:
            found.append(f"its {words} is {its or 'empty'}, the router's {mine or 'empty'}")
    for name, mine in ours.adapters.items():
        its = facts.get("adapters", {}).get(name, mine)
        if its != mine:
            found.append(f"its LoRA adapter {name} is {its or 'empty'}, the router's {mine}")
    return "; ".join(found)
