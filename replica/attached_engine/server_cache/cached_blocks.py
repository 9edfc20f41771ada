"""The blocks that one rank of a vLLM server has cached, with kvroute's fingerprints."""

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from kvroute.blocks.cache_groups import Layout
from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.blocks.tiers import GPU, GROUPS, HOST, Tier
from kvroute.replica.attached_engine.server_cache.server_groups import Place, ServerGroups
from kvroute.replica.attached_engine.server_cache.wire import (
    Batch,
    ClearedEvent,
    RemovedEvent,
    StoredEvent,
)
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)

# Values of `medium` that count. vLLM's own connectors report each block that leaves host memory;
# other connectors do not, and write the medium in another way.
TIERS_BY_MEDIUM: Mapping[str | None, Tier] = {None: GPU, "GPU": GPU, "CPU": HOST}
REMOTE = "REMOTE"  # value of `locality`: the memory is another machine's


class ServerBlocks:
    """Maps the server's block hashes to fingerprints; has no sockets and no clock.

    The fingerprint of a block follows from its tokens, from who may share it, and from the block
    before it. Not every event has all of them: a group with windows or states stores single blocks
    of a prompt, and copies in host memory can have no tokens. A hash is the same in all groups and
    tiers, so the fingerprint of such a block is known if another event with the tokens has, or
    later gets, the same hash. Blocks whose fingerprint is unknown are counted and not published,
    so the server may hold more than this table says.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.groups = ServerGroups(space.block_size)
        # For each group in each tier, the number of blocks under each hash.
        self._copies: dict[Place, dict[BlockHash, int]] = {}
        # Hash of a cached block -> its fingerprint, if it is known.
        self._fingerprints: dict[BlockHash, Fingerprint] = {}
        self._of_adapters = set[BlockHash]()  # the blocks in _copies of requests with an adapter
        # Fingerprints in the engine's first group -> number of tiers that have it cached.
        self._first = Counter[Fingerprint]()
        # True: requests make the server report hits as stores from the prompt's first block on.
        # Then a known block is not counted as a further copy, because it may be such a report.
        self.reports_hits = False
        # Blocks that do not count, or whose fingerprints could not be computed, by reason.
        self.skipped = Counter[str]()

    def __len__(self) -> int:
        """Return the number of the first group's blocks in the memory that the engine computes in.

        Blocks with several hashes, such as states, occur in other groups only.
        """
        return len(self._copies.get((GPU.number, self.groups.first), ()))

    @property
    def in_host(self) -> int:
        """Return the number of the first group's blocks in host memory."""
        return len(self._copies.get((HOST.number, self.groups.first), ()))

    @property
    def total(self) -> int:
        """Return the number of blocks of all groups and tiers."""
        return sum(map(len, self._copies.values()))

    @property
    def layout(self) -> tuple[Mapping[Place, int], Layout | None]:
        """Return what the numbers in this table's events mean."""
        return self.groups.numbers, self.groups.layout

    @property
    def held(self) -> list[dict[BlockHash, int]]:
        """Return the published blocks of each of the engine's groups, each block once."""
        return [
            {hash_: 1 for hash_ in self._copies.get(place, ()) if hash_ in self._fingerprints}
            for place in self.groups.numbers
        ]

    def stored(self) -> list[KVEvent]:
        """Return all published blocks as a replica's events, because the layout has changed."""
        changes: list[KVEvent] = []
        self._first.clear()
        for place, held in zip(self.groups.numbers, self.held, strict=True):
            self._publish(place, [*held], changes)
        return changes

    def hit_blocks(self, chain: Sequence[Fingerprint]) -> int:
        """Return how many leading blocks of a prompt are cached in the first group."""
        for number, fingerprint in enumerate(chain):
            if self._first[fingerprint] < 1:
                return number
        return len(chain)

    def clear(self) -> None:
        """Forget all blocks, but not the groups."""
        self._copies.clear()
        self._first.clear()
        self._fingerprints.clear()
        self._of_adapters.clear()

    def drop_adapters(self) -> list[KVEvent]:
        """Forget the blocks of requests with an adapter, and return what that changes."""
        changes: list[KVEvent] = []
        dropped = [*self._of_adapters]
        for place, copies in self._copies.items():
            self._withdraw(place, [hash_ for hash_ in dropped if copies.pop(hash_, 0)], changes)
        return changes

    def apply(self, batch: Batch) -> list[KVEvent]:
        """Apply the server's events, and return what they change, as a replica's events.

        If they change `layout`, too, use `stored` instead of the result.
        """
        changes: list[KVEvent] = []
        for event in batch.events:
            match event:
                case StoredEvent():
                    self._store(event, changes)
                case RemovedEvent():
                    self._remove(event, changes)
                case ClearedEvent():
                    self.clear()
                    changes.append(AllBlocksCleared())
        return changes

    def _place(self, event: StoredEvent | RemovedEvent) -> Place | None:
        """Return where an event's blocks are; None: these blocks do not count."""
        tier, group = TIERS_BY_MEDIUM.get(event.medium), event.group_idx or 0
        if tier is None or event.locality == REMOTE or not 0 <= group < GROUPS:
            return None
        return tier.number, group

    def _store(self, event: StoredEvent, changes: list[KVEvent]) -> None:
        hashes, place = event.block_hashes, self._place(event)
        if place is None or event.metadata_only:
            self.skipped["other memory"] += len(hashes)
            return
        in_engine = place[0] == GPU.number
        if in_engine:
            self.groups.learn(event)
        is_report = self.reports_hits and in_engine and event.parent_block_hash is None
        first = len(hashes) - self.groups.reported(event) if is_report else 0
        known = [self._fingerprints.get(hash_) for hash_ in hashes]
        chain: Sequence[Fingerprint | None] = self._chain(event) or known
        copies, new = self._copies.setdefault(place, {}), list[BlockHash]()
        for hash_, fingerprint in [*zip(hashes, chain, strict=True)][max(0, first) :]:
            if fingerprint is not None and hash_ not in self._fingerprints:
                self._name(hash_, fingerprint, changes)
            before = copies.get(hash_, 0)
            if before and is_report:
                continue
            copies[hash_] = before + 1
            if event.lora_name:
                self._of_adapters.add(hash_)
            if not before and hash_ in self._fingerprints:
                new.append(hash_)
        self._publish(place, new, changes)

    def _name(self, hash_: BlockHash, fingerprint: Fingerprint, changes: list[KVEvent]) -> None:
        """Record the fingerprint of a hash, and publish the blocks that already have this hash."""
        self._fingerprints[hash_] = fingerprint
        for place, copies in self._copies.items():
            if hash_ in copies:
                self._publish(place, [hash_], changes)

    def _publish(self, place: Place, hashes: list[BlockHash], changes: list[KVEvent]) -> None:
        number = self.groups.numbers.get(place)
        if number is None or not hashes:
            return
        fingerprints = [self._fingerprints[hash_] for hash_ in hashes]
        changes.append(BlockStored(hashes, fingerprints, number))
        if place[1] == self.groups.first:
            self._first.update(fingerprints)

    def _chain(self, event: StoredEvent) -> list[Fingerprint] | None:
        """Return the fingerprints of an event's blocks; None: they cannot be computed."""
        size, parent = event.block_size, event.parent_block_hash
        whole = size > 0 and size % self._space.block_size == 0
        if not whole or len(event.token_ids) != len(event.block_hashes) * size:
            self.skipped["tokens of other blocks"] += len(event.block_hashes)
            return None
        before = [] if parent is None else [self._fingerprints.get(parent)]
        known = [fingerprint for fingerprint in before if fingerprint is not None]
        if len(known) < len(before):
            self.skipped["unknown parent"] += len(event.block_hashes)
            return None
        try:
            return self._computed(event, known)
        except (ValueError, TypeError, OverflowError):
            self.skipped["unknown keys"] += len(event.block_hashes)
            return None

    def _computed(self, event: StoredEvent, before: list[Fingerprint]) -> list[Fingerprint]:
        """Return the fingerprints of an event's blocks. Raises ValueError for unknown keys."""
        ids, keys = np.array(event.token_ids, np.uint32), event.extra_keys
        lora, units = event.lora_name or "", event.block_size // self._space.block_size
        if not keys or not any(keys):
            return self._space.chain(ids, Scope(lora), before=before)[units - 1 :: units]
        if len(keys) != len(event.block_hashes):
            raise ValueError(f"{len(keys)} keys for {len(event.block_hashes)} blocks")
        chain, size = list(before), event.block_size
        for number, block_keys in enumerate(keys):  # each block can have images of its own
            media, salt = _media_and_salt(block_keys or (), lora, is_first=not chain)
            if media and units > 1:
                raise ValueError("the part of a block that an image covers is unknown")
            block = ids[number * size : (number + 1) * size]
            chain += self._space.chain(block, Scope(lora, salt), media, before=chain[-1:])
        return chain[len(before) + units - 1 :: units]

    def _remove(self, event: RemovedEvent, changes: list[KVEvent]) -> None:
        if (place := self._place(event)) is None or place not in self._copies:
            return
        copies, gone = self._copies[place], list[BlockHash]()
        for hash_ in event.block_hashes:
            before = copies.pop(hash_, 0)
            if before > 1:
                copies[hash_] = before - 1
            elif before:
                gone.append(hash_)
        self._withdraw(place, gone, changes)

    def _withdraw(self, place: Place, gone: list[BlockHash], changes: list[KVEvent]) -> None:
        """Publish that a group has these blocks no more, and forget blocks that none has."""
        known = [hash_ for hash_ in gone if hash_ in self._fingerprints]
        if known and (number := self.groups.numbers.get(place)) is not None:
            changes.append(BlockRemoved(known, number))
            if place[1] == self.groups.first:
                for hash_ in known:
                    self._first[self._fingerprints[hash_]] -= 1
        for hash_ in gone:
            if not any(hash_ in copies for copies in self._copies.values()):
                if (fingerprint := self._fingerprints.pop(hash_, None)) is not None:
                    self._first.pop(fingerprint, None)
                self._of_adapters.discard(hash_)


def _media_and_salt(
    keys: Sequence[object], lora: str, *, is_first: bool
) -> tuple[list[MediaSpan], str]:
    """Return a block's images and cache salt.

    Args:
        keys: the block's extra keys; the LoRA name comes first, and the salt last.
        lora: name of the LoRA adapter; empty: none.
        is_first: whether this is the prompt's first block, the only one with a salt.

    Raises:
        ValueError: A key has another meaning, such as the digest of prompt embeddings.
    """
    rest = list(keys)
    if lora and rest and rest[0] == lora:
        rest.pop(0)
    media, salt = list[MediaSpan](), ""
    for key in rest:
        if isinstance(key, list | tuple) and len(key) == 2 and isinstance(key[0], str):
            # The image's length is unknown; here it only has to reach into the block.
            media.append(MediaSpan(key[0], key[1], max(1, 1 - key[1])))
        elif isinstance(key, str) and is_first and not salt:
            salt = key
        else:
            raise ValueError(f"the meaning of the key {key!r} is unknown")
    return media, salt
