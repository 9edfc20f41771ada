"""The blocks that one rank of a vLLM server has cached, with kvroute's fingerprints."""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from kvroute.blocks.chain import Scope, Space
from kvroute.blocks.fingerprint import Fingerprint, MediaSpan
from kvroute.replica.attached_engine.wire import Batch, ClearedEvent, RemovedEvent, StoredEvent
from kvroute.replica.engine.kv_events import (
    AllBlocksCleared,
    BlockHash,
    BlockRemoved,
    BlockStored,
    KVEvent,
)

OWN_MEMORY = (None, "GPU")  # values of `medium` that mean the memory that the engine computes in


class ServerBlocks:
    """Maps the server's block hashes to fingerprints; has no sockets and no clock.

    The fingerprint of a block follows from its tokens, from who may share it, and from the block
    before it. Blocks whose fingerprint cannot be computed are counted and left out, so the server
    may hold more than this table says.
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self._fingerprints: dict[BlockHash, Fingerprint] = {}
        self._cached = set[Fingerprint]()  # the values of _fingerprints
        self._copies: dict[BlockHash, int] = {}  # number of further copies of a block, if any
        # True: requests make the server report hits as stores from the prompt's first block on.
        # Then a known block is not counted as a further copy, because it may be such a report.
        self.reports_hits = False
        self.skipped = Counter[str]()  # blocks that were left out, by reason

    def __len__(self) -> int:
        return len(self._fingerprints)

    @property
    def copies(self) -> dict[BlockHash, int]:
        """Return the number of blocks under each hash."""
        return {hash_: 1 + self._copies.get(hash_, 0) for hash_ in self._fingerprints}

    def hit_blocks(self, chain: Sequence[Fingerprint]) -> int:
        """Return how many leading blocks of a prompt are cached."""
        for number, fingerprint in enumerate(chain):
            if fingerprint not in self._cached:
                return number
        return len(chain)

    def clear(self) -> None:
        """Forget all blocks."""
        self._fingerprints.clear()
        self._cached.clear()
        self._copies.clear()

    def apply(self, batch: Batch) -> list[KVEvent]:
        """Apply the server's events, and return what they change, as a replica's events."""
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

    def _store(self, event: StoredEvent, changes: list[KVEvent]) -> None:
        hashes = event.block_hashes
        if reason := self._refusal(event):
            self.skipped[reason] += len(hashes)
            return
        is_report = self.reports_hits and event.parent_block_hash is None
        chain = self._chain(event)
        if chain is None:
            return
        new: list[tuple[BlockHash, Fingerprint]] = []
        for hash_, fingerprint in zip(hashes, chain, strict=True):
            if hash_ not in self._fingerprints:
                self._fingerprints[hash_] = fingerprint
                self._cached.add(fingerprint)
                new.append((hash_, fingerprint))
            elif not is_report:
                self._copies[hash_] = self._copies.get(hash_, 0) + 1
        if new:
            stored = BlockStored([hash_ for hash_, _ in new], [added for _, added in new])
            changes.append(stored)

    def _refusal(self, event: StoredEvent) -> str:
        """Return why the blocks of an event have no fingerprint; empty: they have one."""
        if event.medium not in OWN_MEMORY:
            return "other memory"
        if event.group_idx:
            return "other KV cache group"
        tokens = len(event.block_hashes) * self._space.block_size
        if event.block_size != self._space.block_size or len(event.token_ids) != tokens:
            return "other block size"
        return ""

    def _chain(self, event: StoredEvent) -> list[Fingerprint] | None:
        """Return the fingerprints of an event's blocks; None: they cannot be computed."""
        parent = event.parent_block_hash
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
        lora = event.lora_name or ""
        if not keys or not any(keys):
            return self._space.chain(ids, Scope(lora), before=before)
        if len(keys) != len(event.block_hashes):
            raise ValueError(f"{len(keys)} keys for {len(event.block_hashes)} blocks")
        chain, size = list(before), event.block_size
        for number, block_keys in enumerate(keys):  # each block can have images of its own
            media, salt = _media_and_salt(block_keys or (), lora, is_first=not chain)
            block = ids[number * size : (number + 1) * size]
            chain += self._space.chain(block, Scope(lora, salt), media, before=chain[-1:])
        return chain[len(before) :]

    def _remove(self, event: RemovedEvent, changes: list[KVEvent]) -> None:
        if event.medium not in OWN_MEMORY or event.group_idx:
            return
        gone: list[BlockHash] = []
        for hash_ in event.block_hashes:
            if copies := self._copies.pop(hash_, 0):
                if copies > 1:
                    self._copies[hash_] = copies - 1
            elif (fingerprint := self._fingerprints.pop(hash_, None)) is not None:
                self._cached.discard(fingerprint)
                gone.append(hash_)
        if gone:
            changes.append(BlockRemoved(gone))


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
