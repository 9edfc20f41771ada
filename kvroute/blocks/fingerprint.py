"""Fingerprints of blocks: one chained 64-bit hash for each full block of token ids.

The fingerprint of a block depends on its tokens and on the fingerprint of the block before, its
parent. So equal prefixes have equal fingerprints.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from struct import Struct as Packing
from typing import NewType, cast

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

Fingerprint = NewType("Fingerprint", int)

FINGERPRINT_VERSION = "kvroute/2"  # part of every fingerprint; new if their computation changes

# Cast once: calling Fingerprint() on each hash would take as long as the hash itself.
_block_hash = cast(Callable[[bytes, Fingerprint], Fingerprint], xxh3_64_intdigest)

_pack_offset = Packing("<q").pack


def pack(fingerprints: Iterable[Fingerprint]) -> bytes:
    """Encode each fingerprint as eight little-endian bytes."""
    return np.fromiter(fingerprints, dtype="<u8").tobytes()


def unpack(packed: bytes) -> tuple[Fingerprint, ...]:
    return tuple(np.frombuffer(packed, dtype="<u8").tolist())


class MediaSpan(Struct, frozen=True, array_like=True):
    """An image, a video or a sound in a prompt.

    The ids of its tokens do not depend on its content, so the fingerprints include `identifier`.
    """

    identifier: str  # vLLM's hash of the content: equal content has an equal hash
    # Index of its first token in the token ids. It is negative if the span begins in an earlier
    # part of the prompt.
    offset: int
    length: int  # tokens

    @property
    def end(self) -> int:
        return self.offset + self.length


def root(
    *, model: str, revision: str = "", block_size: int, variant: str = "", namespace: str = ""
) -> Fingerprint:
    """Return the parent of a prompt's first block; requests with equal parents can share blocks."""
    name = f"{FINGERPRINT_VERSION}|{model}|{revision}|{block_size}|{variant}|{namespace}"
    return Fingerprint(xxh3_64_intdigest(name.encode()))


def namespaced(parent: Fingerprint, namespace: str) -> Fingerprint:
    """Return the parent of the first block that a namespace does not share.

    Args:
        parent: the fingerprint of the last block that all namespaces share.
        namespace: the cache salt of the request.
    """
    return _block_hash(namespace.encode(), parent)


def fingerprints(
    token_ids: NDArray[np.uint32],
    *,
    block_size: int,
    parent: Fingerprint,
    media: Sequence[MediaSpan] = (),
) -> list[Fingerprint]:
    """Return one fingerprint per full block: `xxh3_64(block as little-endian u32, seed)`.

    The seed is the parent's fingerprint, into which each of the block's media is mixed:
    `seed = xxh3_64(offset in the block as little-endian i64, then the identifier, seed)`.

    Args:
        token_ids: shape (n,); the last n % block_size ids do not fill a block and are ignored.
        block_size: tokens of one block.
        parent: the fingerprint before the first block.
        media: sorted by offset; media that end before the token ids are ignored.
    """
    full_blocks = len(token_ids) // block_size
    packed = np.ascontiguousarray(token_ids[: full_blocks * block_size], dtype="<u4")
    blocks: list[bytes] = packed.view(f"V{4 * block_size}").tolist()
    previous = parent
    if not media:
        return [previous := _block_hash(block, previous) for block in blocks]
    remaining, ends = deque(media), range(block_size, len(packed) + 1, block_size)
    return [
        previous := _block_hash(
            block,
            _mixed(previous, end - block_size, end, remaining)
            if remaining and remaining[0].offset < end
            else previous,
        )
        for block, end in zip(blocks, ends, strict=True)
    ]


def media_in(media: Sequence[MediaSpan], begin: int, end: int) -> list[MediaSpan]:
    """Return the media that vLLM includes in its hash of the tokens [begin, end).

    These are the media that overlap the tokens, up to and with the first one that extends beyond
    `end`. If the last span of the prompt ends at or before `begin`, vLLM includes none, even if
    an earlier and longer span overlaps the tokens.
    """
    included = list[MediaSpan]()
    if not media or media[-1].end <= begin:
        return included
    for span in media:
        if span.offset >= end:
            break
        if span.end > begin:
            included.append(span)
        if span.end > end:
            break
    return included


def _mixed(parent: Fingerprint, begin: int, end: int, media: deque[MediaSpan]) -> Fingerprint:
    """Return the seed of the block [begin, end); remove the first media that end before it."""
    while media and media[0].end <= begin:
        media.popleft()
    seed = parent
    for span in media_in(media, begin, end):
        seed = _block_hash(_pack_offset(span.offset - begin) + span.identifier.encode(), seed)
    return seed


def reusable_blocks(prompt_tokens: int, block_size: int) -> int:
    """Return how many blocks of a prompt can be hits: full ones without the prompt's last token.

    The engine always computes the last token.
    """
    return max(0, (prompt_tokens - 1) // block_size)
