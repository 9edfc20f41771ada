"""Equal prefixes have equal fingerprints: token ids -> one chained 64-bit hash per full block."""

from collections.abc import Callable
from typing import NewType, cast

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Fingerprint = NewType("Fingerprint", int)

FINGERPRINT_VERSION = "kvroute/1"

# Cast once: calling Fingerprint() on each hash would take as long as the hash itself.
_block_hash = cast(Callable[[bytes, Fingerprint], Fingerprint], xxh3_64_intdigest)


def root(
    *, model: str, revision: str = "", block_size: int, lora: str = "", namespace: str = ""
) -> Fingerprint:
    """The parent of every first block; roots differ where caches cannot be shared."""
    name = f"{FINGERPRINT_VERSION}|{model}|{revision}|{block_size}|{lora}|{namespace}"
    return Fingerprint(xxh3_64_intdigest(name.encode()))


def fingerprints(
    token_ids: NDArray[np.uint32], *, block_size: int, parent: Fingerprint
) -> list[Fingerprint]:
    """One fingerprint for each full block: `xxh3_64(block as little-endian u32, seed=parent's)`.

    token_ids: shape (n,); the last n % block_size ids fill no block and are ignored.
    """
    full_blocks = len(token_ids) // block_size
    packed = np.ascontiguousarray(token_ids[: full_blocks * block_size], dtype="<u4")
    blocks: list[bytes] = packed.view(f"V{4 * block_size}").tolist()
    previous = parent
    return [previous := _block_hash(block, previous) for block in blocks]


def reusable_blocks(prompt_tokens: int, block_size: int) -> int:
    """The most blocks that a prompt can reuse: its last token is always computed."""
    return max(0, (prompt_tokens - 1) // block_size)
