"""KV cache events become changes of the set of fingerprints that a replica holds."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from replica.kvindex.fingerprint import Fingerprint, fingerprints, root

BlockHash = int | bytes  # the engine's own name for a block; never leaves the replica


@dataclass(frozen=True, slots=True)
class BlockStored:
    block_hashes: Sequence[BlockHash]  # one for each block, in prompt order
    parent: BlockHash | None  # the block before the first; None at the start of a prompt
    token_ids: Sequence[int]  # block_size ids for each block
    namespace: str = ""  # cache salt; told with a prompt's first block only
    lora: str = ""  # adapter that computed them


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    block_hashes: Sequence[BlockHash]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """The engine forgot every block."""


@dataclass(frozen=True, slots=True)
class EventsLost:
    """Events went missing between the engine and us: what we know may be wrong."""


@dataclass(frozen=True, slots=True)
class BlocksHeld:
    """All that the engine has cached, as it is after the events before this one."""

    copies: Mapping[BlockHash, int]  # blocks under each hash


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared | EventsLost | BlocksHeld


@dataclass(slots=True)
class Changes:
    """A difference between two moments of a replica's set: `cleared` comes first."""

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


@dataclass(frozen=True, slots=True)
class Comparison:
    """An account of the blocks that a replica holds, judged by one nearer to the engine."""

    blocks: int  # in the account
    missing: int = 0  # that it should have as well
    surplus: int = 0  # that it should not have

    @classmethod
    def of(cls, account: AbstractSet[Any], truth: AbstractSet[Any]) -> "Comparison":
        return cls(len(account), len(truth - account), len(account - truth))

    @property
    def true_blocks(self) -> int:
        return self.blocks + self.missing - self.surplus

    @property
    def drift(self) -> int:
        return self.missing + self.surplus


class BlockTable:
    """The fingerprints that a replica holds, kept right by the engine's events in their order."""

    def __init__(self, *, model: str, revision: str, block_size: int) -> None:
        self._model = model
        self._revision = revision
        self._block_size = block_size
        self._fingerprints: dict[BlockHash, Fingerprint] = {}
        # vLLM does not deduplicate blocks: a hash can name several, each removed by itself.
        self._copies: dict[BlockHash, int] = {}

    def __len__(self) -> int:
        return len(self._fingerprints)

    def held(self) -> list[Fingerprint]:
        return list(self._fingerprints.values())

    def apply(self, events: Iterable[KVEvent], changes: Changes) -> Comparison | None:
        """Takes the events in, and notes in `changes` what they change. When the engine says what
        it holds: how right the table was until then."""
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
                    pass  # whoever reads the events has the engine tell what it holds
        return comparison

    def _store(self, event: BlockStored, changes: Changes) -> None:
        parent = self._parent_of(event)
        if parent is None:
            return  # its beginning was told in lost events, so nobody could match it
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
        """Forgets what the engine no longer holds. What it holds unknown to us stays unknown: a
        hash does not tell its tokens."""
        comparison = Comparison.of(self._fingerprints.keys(), event.copies.keys())
        for block_hash in self._fingerprints.keys() - event.copies.keys():
            changes.remove(self._fingerprints.pop(block_hash))
        self._copies = {known: event.copies[known] for known in self._fingerprints}
        return comparison

    def _clear(self, changes: Changes) -> None:
        self._fingerprints.clear()
        self._copies.clear()
        changes.clear()
