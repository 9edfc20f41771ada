"""KV cache events are converted to changes of the replica's set of fingerprints."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from kvroute.contract.audit_report import Comparison
from kvroute.contract.fingerprint import Fingerprint, fingerprints, root
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    EventsLost,
    KVEvent,
)


@dataclass(slots=True)
class Changes:
    """A change of a replica's set of fingerprints; `cleared` applies first."""

    cleared: bool = False
    added: set[Fingerprint] = field(default_factory=set)
    removed: set[Fingerprint] = field(default_factory=set)

    def __bool__(self) -> bool:
        return self.cleared or bool(self.added) or bool(self.removed)

    def add(self, fingerprint: Fingerprint) -> None:
        self.removed.discard(fingerprint)
        self.added.add(fingerprint)

    def remove(self, fingerprint: Fingerprint) -> None:
        self.added.discard(fingerprint)
        self.removed.add(fingerprint)

    def clear(self) -> None:
        self.cleared = True
        self.added.clear()
        self.removed.clear()


class BlockTable:
    """The fingerprints of the blocks that a replica holds, updated by the engine's events."""

    def __init__(self, *, model: str, revision: str, block_size: int) -> None:
        self._model = model
        self._revision = revision
        self._block_size = block_size
        self._fingerprints: dict[BlockHash, Fingerprint] = {}
        # vLLM does not deduplicate blocks: a hash can have several, each removed separately.
        self._copies: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._fingerprints)

    def held(self) -> list[Fingerprint]:
        return list(self._fingerprints.values())

    def apply(self, events: Iterable[KVEvent], changes: Changes) -> Comparison | None:
        """Applies the events and adds their effect to `changes`. After a BlocksHeld event it
        returns how the table differed from it."""
        comparison = None
        for event in events:
            match event:
                case BlockStored():
                    self._store(event, changes)
                case BlockRemoved():
                    self._remove(event, changes)
                case AllBlocksCleared():
                    self._clear(changes)
                case BlocksHeld():
                    comparison = self._reconcile(event, changes)
                case EventsLost():
                    pass  # the reader of the events requests BlocksHeld
        return comparison

    def _store(self, event: BlockStored, changes: Changes) -> None:
        parent = self._parent_of(event)
        if parent is None:
            return  # the events of its parent were lost, so its fingerprint is unknown
        chain = fingerprints(
            np.asarray(event.token_ids, dtype=np.uint32),
            block_size=self._block_size,
            parent=parent,
        )
        for block_hash, fingerprint in zip(event.block_hashes, chain, strict=True):
            copies = self._copies.get(block_hash, 0)
            self._copies[block_hash] = copies + 1
            if copies == 0:
                self._fingerprints[block_hash] = fingerprint
                changes.add(fingerprint)

    def _parent_of(self, event: BlockStored) -> Fingerprint | None:
        if event.parent is not None:
            return self._fingerprints.get(event.parent)
        return root(
            model=self._model,
            revision=self._revision,
            block_size=self._block_size,
            lora=event.lora,
            namespace=event.namespace,
        )

    def _remove(self, event: BlockRemoved, changes: Changes) -> None:
        for block_hash in event.block_hashes:
            copies = self._copies.get(block_hash, 0)
            if copies > 1:
                self._copies[block_hash] = copies - 1
            elif copies == 1:
                del self._copies[block_hash]
                changes.remove(self._fingerprints.pop(block_hash))

    def _reconcile(self, event: BlocksHeld, changes: Changes) -> Comparison:
        """Removes blocks that the engine no longer holds. Unknown blocks that it holds stay
        unknown: their tokens cannot be derived from a hash."""
        comparison = Comparison.of(self._fingerprints.keys(), event.copies.keys())
        for block_hash in self._fingerprints.keys() - event.copies.keys():
            changes.remove(self._fingerprints.pop(block_hash))
        self._copies = {known: event.copies[known] for known in self._fingerprints}
        return comparison

    def _clear(self, changes: Changes) -> None:
        self._fingerprints.clear()
        self._copies.clear()
        changes.clear()
