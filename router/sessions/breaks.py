"""Finds a change in a chat's history: where the new prompt differs from that of an earlier turn.

A cached prefix can be reused only up to the first change. The engine computes all text after the
change again, even text that both prompts have in common.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh32_intdigest

from kvroute.blocks.fingerprint import MediaFeature
from kvroute.contract.generation import TokenIds

PROBE_TOKENS = 16  # length of a piece of the old prompt that is searched in the new prompt
# Equal tokens in a row after which the prompts are known to agree again. The markup between two
# messages is shorter, so it does not count.
ENOUGH_TOKENS = 64
# A piece of the old prompt that begins p tokens after the first difference is searched in the first
# 2 * p + MIN_REACH tokens of the new prompt after that difference.
MIN_REACH = 2_048
# The most tokens after the first difference that are searched. A search takes milliseconds.
MAX_SEARCHED = 131_072
FIRST_STEP = 1_024  # tokens compared in the first step; each step compares twice as many
TOKEN_BYTES = 4  # size of a token id in an array


@dataclass(frozen=True, slots=True)
class Span:
    """The length and hash of some tokens of a prompt, without the tokens themselves."""

    tokens: int
    # Hash in hexadecimal. One router gives equal tokens equal hashes; each router has other hashes.
    hash: str


@dataclass(frozen=True, slots=True)
class Difference:
    """The first change between two prompts, and the number of equal tokens after it."""

    token: int  # position of the first token that differs, from 0
    before: Span  # the changed part in the earlier prompt
    after: Span  # the changed part in the later prompt
    common: int  # number of equal tokens directly after the changed part

    def around(self, tokens: int) -> slice:
        """Return the changed part of the later prompt, with `tokens` tokens on each side."""
        return slice(max(0, self.token - tokens), self.token + self.after.tokens + tokens)


@dataclass(frozen=True, slots=True)
class Break:
    """A change in a chat's history: the prompt does not continue that of the earlier turn."""

    role: str  # role of the changed message, or another part of the prompt; one of chats.PLACES
    message: int | None  # number of the changed message, from 0; None: no message changed
    difference: Difference
    kind: str = ""  # kind of the changed text, see volatile.py; empty if it is of no known kind

    @property
    def lost(self) -> range:
        """Return the positions of the tokens that could have been cache hits without the change."""
        begin = self.difference.token + self.difference.after.tokens
        return range(begin, begin + self.difference.common)

    def as_json(self, *, known_tokens: int) -> dict[str, Any] | None:
        """Return the break as shown to the client, or None if it lost no cache hits.

        Args:
            known_tokens: leading tokens of the prompt that some replica has or had cached. These
                were not lost.
        """
        tokens = self.lost.stop - max(self.lost.start, known_tokens)
        if tokens <= 0:
            return None
        before, after = self.difference.before, self.difference.after
        return {
            "message": {"index": self.message, "role": self.role},
            "kind": self.kind or None,
            "token": self.difference.token,
            "tokens": tokens,
            "before": {"tokens": before.tokens, "hash": before.hash},
            "after": {"tokens": after.tokens, "hash": after.hash},
        }


def with_image_numbers(token_ids: TokenIds, features: Sequence[MediaFeature]) -> TokenIds:
    """Return the token ids, with the tokens of each image replaced by a hash of the image.

    Without this, prompts with different images would be equal, since all images have the same
    placeholder tokens.
    """
    if not features:
        return token_ids
    numbered = token_ids.copy()
    for feature in features:
        numbered[feature.offset : feature.end] = np.uint32(
            xxh32_intdigest(feature.identifier.encode())
        )
    return numbered


def difference(old: TokenIds, new: TokenIds, *, seed: int) -> Difference | None:
    """Return the first change from one prompt to the other.

    Args:
        seed: seed of the hashes.

    Returns:
        None if one prompt continues the other, or if they have no text in common after the change.
    """
    token = _common_length(old, new)
    if token == min(len(old), len(new)):
        return None
    agreement = _find_agreement(old[token:], new[token:])
    if agreement is None:
        return None
    removed, added, common = agreement
    return Difference(
        token,
        before=_span(old[token : token + removed], seed),
        after=_span(new[token : token + added], seed),
        common=common,
    )


def _find_agreement(old: TokenIds, new: TokenIds) -> tuple[int, int, int] | None:
    """Find where two token sequences agree again.

    Returns:
        The positions in `old` and in `new` where they agree, and for how many tokens.
    """
    packed = new[:MAX_SEARCHED].tobytes()
    enough = max(PROBE_TOKENS, min(ENOUGH_TOKENS, len(old) // 2))
    for probe in _probes(min(len(old), MAX_SEARCHED) - PROBE_TOKENS):
        for match in _matches(packed, old[probe : probe + PROBE_TOKENS].tobytes(), probe):
            back = _common_length(old[:probe][::-1], new[:match][::-1])
            common = back + _common_length(old[probe:], new[match:])
            if common >= enough:
                return probe - back, match - back, common
    return None


def _probes(last: int) -> Iterator[int]:
    """Yield the positions of the pieces to search for.

    Each is about twice as far as the one before. The last one is near the end.
    """
    probe = 0
    while probe <= last:
        yield probe
        probe = 2 * probe + 1
    if last > 0:
        yield last - last // 8


def _matches(packed: bytes, tokens: bytes, probe: int) -> Iterator[int]:
    """Yield positions at which the new prompt has the tokens of a piece.

    These are the piece's own position, and the first position within its reach (see MIN_REACH).

    Args:
        packed: the token ids of the new prompt, as bytes.
        tokens: the token ids of the piece, as bytes.
        probe: position of the piece in the old prompt.
    """
    begin = probe * TOKEN_BYTES
    if packed[begin : begin + len(tokens)] == tokens:
        yield probe
    offset = packed.find(tokens, 0, 2 * begin + MIN_REACH * TOKEN_BYTES)
    if offset >= 0 and offset % TOKEN_BYTES == 0:  # other matches begin inside a token id
        yield offset // TOKEN_BYTES


def _common_length(left: TokenIds, right: TokenIds) -> int:
    """Return the length of the longest common prefix of two token sequences."""
    length, begin, step = min(len(left), len(right)), 0, FIRST_STEP
    while begin < length:
        end = min(begin + step, length)
        differ = left[begin:end] != right[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, step = end, 2 * step
    return length


def _span(token_ids: TokenIds, seed: int) -> Span:
    return Span(len(token_ids), xxh3_64_hexdigest(token_ids.tobytes(), seed))
