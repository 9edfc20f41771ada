"""Where a chat's prompt parts from an earlier one, and what of the earlier one stands behind that.

A cache holds leading tokens only. So what both prompts have behind the place is computed again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxhash import xxh3_64_hexdigest, xxh32_intdigest

from kvroute.blocks.fingerprint import Feature
from kvroute.contract.generation import TokenIds

ALIKE = 16  # tokens in a row that both prompts have, so that they count as going on alike
SURE = 64  # equal tokens that are no coincidence, unlike the markup between two messages
REACH = 2_048  # tokens; what comes soon behind the place is looked for so far behind it at least
SEARCHED = 131_072  # tokens behind the place; so the longest prompts take milliseconds
STEP = 1_024  # tokens compared at once, at first: most differences come early
TOKEN_BYTES = 4


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens of a prompt, without saying which."""

    tokens: int
    hash: str  # hexadecimal; equal for equal tokens, within one router


@dataclass(frozen=True, slots=True)
class Difference:
    """The first place where two prompts differ, and how they go on alike behind it."""

    token: int  # the first that differs, counted from 0
    before: Span  # the changed part in the earlier prompt
    after: Span  # the changed part in this prompt
    alike: int  # tokens behind it that both prompts have

    def around(self, tokens: int) -> slice:
        """Return where it stands in the later prompt, with so many tokens before and behind it."""
        return slice(max(0, self.token - tokens), self.token + self.after.tokens + tokens)


@dataclass(frozen=True, slots=True)
class Break:
    """A chat's prompt that is not the earlier one continued."""

    role: str  # one of chats.PLACES: the role of the changed message, or another part
    message: (
        int | None
    )  # number of the changed message in the chat, from 0; None: no message changed
    difference: Difference
    kind: str = ""  # kind of the changed text, see `volatile`; empty: another kind

    @property
    def lost(self) -> range:
        """Return the tokens that a cache could have held without the change."""
        begin = self.difference.token + self.difference.after.tokens
        return range(begin, begin + self.difference.alike)

    def as_json(self, *, known_tokens: int) -> dict[str, Any] | None:
        """Return the break for the client; None if nothing was lost.

        Nothing is lost if replicas held as many leading tokens of the prompt all the same.
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


def with_image_numbers(token_ids: TokenIds, features: Sequence[Feature]) -> TokenIds:
    """Return the ids with a number for each image in place of its tokens.

    The tokens themselves are the same for all images.
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
    """Return how the prompts differ.

    Returns:
        None: `new` continues `old`, or they do not agree again after the first difference.
    """
    token = _same(old, new)
    if token == min(len(old), len(new)):
        return None
    found = _alike_again(old[token:], new[token:])
    if found is None:
        return None
    removed, added, alike = found
    return Difference(
        token,
        before=_span(old[token : token + removed], seed),
        after=_span(new[token : token + added], seed),
        alike=alike,
    )


def _alike_again(old: TokenIds, new: TokenIds) -> tuple[int, int, int] | None:
    """Return where both agree again: positions in `old` and `new`, and for how many tokens."""
    packed = new[:SEARCHED].tobytes()
    enough = max(ALIKE, min(SURE, len(old) // 2))
    for probe in _probes(min(len(old), SEARCHED) - ALIKE):
        for there in _places(packed, old[probe : probe + ALIKE].tobytes(), probe):
            back = _same(old[:probe][::-1], new[:there][::-1])
            alike = back + _same(old[probe:], new[there:])
            if alike >= enough:
                return probe - back, there - back, alike
    return None


def _probes(last: int) -> Iterator[int]:
    """Yield positions, each about twice as far as the last one, and one near the end."""
    probe = 0
    while probe <= last:
        yield probe
        probe = 2 * probe + 1
    if last > 0:
        yield last - last // 8


def _places(packed: bytes, tokens: bytes, probe: int) -> Iterator[int]:
    """Return where these tokens are: at the probe's position, else the first place in reach."""
    begin = probe * TOKEN_BYTES
    if packed[begin : begin + len(tokens)] == tokens:
        yield probe
    found = packed.find(tokens, 0, 2 * begin + REACH * TOKEN_BYTES)
    if found >= 0 and found % TOKEN_BYTES == 0:  # else it begins amid a token
        yield found // TOKEN_BYTES


def _same(one: TokenIds, other: TokenIds) -> int:
    """Return the number of equal tokens at the start of both."""
    length, begin, step = min(len(one), len(other)), 0, STEP
    while begin < length:
        end = min(begin + step, length)
        differ = one[begin:end] != other[begin:end]
        first = int(differ.argmax())
        if differ[first]:
            return begin + first
        begin, step = end, 2 * step
    return length


def _span(token_ids: TokenIds, seed: int) -> Span:
    return Span(len(token_ids), xxh3_64_hexdigest(token_ids.tobytes(), seed))
