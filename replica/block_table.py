"""Converts KV cache events to changes of the replica's published set of fingerprints.

A replica publishes a layout of its KV cache (blocks/cache_groups.py). All groups of the engine with
the same kind of attention and the same sizes are one entry of the layout.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, repeat

from kvroute.blocks.cache_groups import HOST_GROUPS, group_fingerprint
from kvroute.blocks.fingerprint import Fingerprint
from kvroute.contract.comparison import Comparison
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlocksHeld,
    BlockStored,
    EventsLost,
    KVEvent,
    LayoutChanged,
    Transfers,
)

NO_BLOCKS: Mapping[BlockHash, int] = {}


@dataclass(slots=True)
class Changes:
    """Changes of a replica's set of fingerprints.

    If `cleared` is True, the set is cleared before `added` is applied.
    """

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


class _CacheGroup:
    """The cached blocks of one KV cache group of the engine."""

    def __init__(self, entry: int, published: dict[BlockHash, Fingerprint]) -> None:
        self.entry = entry  # number of the layout's entry that this group belongs to
        # Published blocks of the entry -> their fingerprints. A block is published while every
        # group of the entry has it cached. All groups of the entry share this object.
        self.published = published
        self.others: list[_CacheGroup] = []  # the other groups of the entry
        # Number of cached blocks under each hash. vLLM does not deduplicate blocks: several blocks
        # can have one hash, and the removal of each is a separate event.
        self.copies: dict[BlockHash, int] = {}

    def store(self, event: BlockStored, changes: Changes) -> None:
        for block_hash, fingerprint in zip(event.block_hashes, event.fingerprints, strict=True):
            copies = self.copies.get(block_hash, 0)
            self.copies[block_hash] = copies + 1
            if copies == 0 and self._others_have(block_hash):
                published = group_fingerprint(fingerprint, self.entry)
                self.published[block_hash] = published
                changes.add(published)

    def _others_have(self, block_hash: BlockHash) -> bool:
        """Return whether all other groups of the entry have the block cached."""
        return not self.others or all(block_hash in other.copies for other in self.others)

    def remove(self, event: BlockRemoved, changes: Changes) -> None:
        for block_hash in event.block_hashes:
            copies = self.copies.get(block_hash, 0)
            if copies > 1:
                self.copies[block_hash] = copies - 1
            elif copies == 1:
                del self.copies[block_hash]
                self._withdraw(block_hash, changes)

    def reconcile(self, held: Mapping[BlockHash, int], changes: Changes) -> Comparison:
        """Remove the blocks that the engine no longer has cached, and count all differences.

        Blocks that the engine has cached and this group lacks are counted, but not added: their
        fingerprints cannot be derived from their hashes.

        Args:
            held: The engine's list: hash -> number of cached blocks.
            changes: Receives the removals.
        """
        comparison = Comparison.of(self.copies.keys(), held.keys())
        for block_hash in self.copies.keys() - held.keys():
            self._withdraw(block_hash, changes)
        self.copies = {
            block_hash: held[block_hash] for block_hash in self.copies if block_hash in held
        }
        return comparison

    def _withdraw(self, block_hash: BlockHash, changes: Changes) -> None:
        published = self.published.pop(block_hash, None)
        if published is not None:
            changes.remove(published)


class BlockTable:
    """The fingerprints of a replica's cached blocks, updated by the engine's events.

    A block counts as cached only if all groups of its entry in the layout have it cached.
    """

    def __init__(self, group_entries: Sequence[int | None] = (0,)) -> None:
        """Create an empty table.

        Args:
            group_entries: For each of the engine's groups, the number of its entry in the layout.
                None: the group takes no part in prefix caching.
        """
        # Published blocks in host memory of the layout's first entry. The first entry is full
        # attention if the model has any.
        self.in_host: dict[BlockHash, Fingerprint] = {}
        self._divide(group_entries)
        # Differences from the last BlocksHeld event. None: there was none.
        self.compared: Comparison | None = None
        # The part of them in host memory. None: there is no host tier.
        self.compared_in_host: Comparison | None = None

    def _divide(self, group_entries: Sequence[int | None]) -> None:
        """Begin with empty groups; see `__init__`."""
        self.in_host.clear()
        entries: dict[int, list[_CacheGroup]] = {}
        published = {HOST_GROUPS: self.in_host}
        self._groups = [
            None if entry is None else _add_group(entry, entries, published.setdefault(entry, {}))
            for entry in group_entries
        ]
        self._has_host = any(entry >= HOST_GROUPS for entry in entries)
        self._published = [*published.values()]

    def __len__(self) -> int:
        return sum(map(len, self._published))

    def held(self) -> list[Fingerprint]:
        """Return all fingerprints to publish."""
        return [fingerprint for published in self._published for fingerprint in published.values()]

    def apply(self, events: Iterable[KVEvent], changes: Changes) -> None:
        """Apply the events and add their effect to `changes`."""
        for event in events:
            match event:
                case BlockStored():
                    if group := self._groups[event.group]:
                        group.store(event, changes)
                case BlockRemoved():
                    if group := self._groups[event.group]:
                        group.remove(event, changes)
                case AllBlocksCleared():
                    self._clear(changes)
                case BlocksHeld():
                    self._reconcile(event, changes)
                case LayoutChanged():
                    self._divide(event.group_entries)
                    changes.clear()
                case Transfers():
                    pass  # BlockStored and BlockRemoved report the same blocks
                case EventsLost():
                    pass  # the publisher then requests a BlocksHeld event

    def _reconcile(self, event: BlocksHeld, changes: Changes) -> None:
        """Compare all groups with the event, and remove the blocks that it lacks.

        Groups that the event leaves out have no cached blocks.
        """
        own, in_host = Comparison(0), Comparison(0)
        held_by_group = chain(event.copies, repeat(NO_BLOCKS))
        for group, held in zip(self._groups, held_by_group, strict=False):
            if group and group.entry < HOST_GROUPS:
                own += group.reconcile(held, changes)
            elif group:
                in_host += group.reconcile(held, changes)
        self.compared = own + in_host
        self.compared_in_host = in_host if self._has_host else None

    def _clear(self, changes: Changes) -> None:
        for group in self._groups:
            if group:
                group.copies.clear()
                group.published.clear()
        changes.clear()


def _add_group(
    entry: int, entries: dict[int, list[_CacheGroup]], published: dict[BlockHash, Fingerprint]
) -> _CacheGroup:
    """Add a group to the entry, link it with the entry's other groups, and return it."""
    others = entries.setdefault(entry, [])
    group = _CacheGroup(entry, published)
    for other in others:
        other.others.append(group)
        group.others.append(other)
    others.append(group)
    return group
