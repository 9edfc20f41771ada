"""The prefix cache of a server without a model, whose events are published as vLLM does."""

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

import numpy as np

from tests.support.kv_publisher import Publisher

BLOCK_SIZE = 16  # tokens of a block
BLOCKS = 20_000  # blocks that fit into the cache
HASH_BYTES = 8


class MockCache:
    """A set of blocks, of which the least recently used ones are evicted."""

    def __init__(self, publisher: Publisher) -> None:
        self._publisher = publisher
        self._blocks = OrderedDict[bytes, None]()  # hash of a prompt up to a block; oldest first
        self._events: list[dict[str, Any]] = []  # not published yet

    def add(self, token_ids: Sequence[int]) -> None:
        """Store the full blocks of a prompt."""
        hashes = _hashes(token_ids)
        known = next((n for n, each in enumerate(hashes) if each not in self._blocks), len(hashes))
        for each in hashes:
            self._blocks[each] = None
            self._blocks.move_to_end(each)
        if known < len(hashes):
            stored = {
                "type": "BlockStored",
                "block_hashes": hashes[known:],
                "parent_block_hash": hashes[known - 1] if known else None,
                "token_ids": [*token_ids[known * BLOCK_SIZE : len(hashes) * BLOCK_SIZE]],
                "block_size": BLOCK_SIZE,
            }
            self._events.append(stored)
        surplus = range(len(self._blocks) - BLOCKS)
        if evicted := [self._blocks.popitem(last=False)[0] for _ in surplus]:
            self._events.append({"type": "BlockRemoved", "block_hashes": evicted})

    async def publish(self) -> None:
        """Publish the events since the last call, as one batch."""
        if self._events:
            events, self._events = self._events, []
            await self._publisher.send(*events)


def _hashes(token_ids: Sequence[int]) -> list[bytes]:
    """Return a hash for each full block of a prompt, of all tokens up to its end."""
    packed, hashes, parent = np.array(token_ids, dtype=np.uint32), list[bytes](), b""
    for end in range(BLOCK_SIZE, len(packed) + 1, BLOCK_SIZE):
        block = packed[end - BLOCK_SIZE : end].tobytes()
        parent = blake2b(parent + block, digest_size=HASH_BYTES).digest()
        hashes.append(parent)
    return hashes
