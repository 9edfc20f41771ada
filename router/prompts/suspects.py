"""Which bodies may have a special token, found in a fraction of the time of a look at each string.

A body is no suspect if it can have none, however it is written. Nearly all others are none either.
"""

import re
from collections.abc import Collection, Iterable

from kvroute.router.prompts import written
from kvroute.router.prompts.patterns import by_start

PIECE = 1 << 16  # bytes that are searched at a time, then other threads may run
MOST = 8  # characters of a name's beginning
WORDS = re.compile(r"[\w-]*")
# An escape in JSON in a string, of which a character is escaped once more: \\u00\u0033c.
TWICE = rb"\\\\[u0-9a-fA-F]{0,4}\\u00[2-7]"


class Suspects:
    """tokens: that no text may have. tails: what a name may not begin with. insides: what no name
    may be. deleted: by the template."""

    def __init__(
        self,
        tokens: Collection[str],
        tails: Collection[str],
        insides: Collection[str],
        deleted: Collection[str],
    ) -> None:
        firsts = {token[0] for token in tokens}
        self._hints = {b"\\u", *map(_hint, firsts), *map(_hint, map(_rare, {*tails, *insides}))}
        self._texts = _either(_pairs(tokens))
        names = {*map(_beginning, tails), *(_beginning(f'{inside}"') for inside in insides)}
        self._names = [re.compile(each) for each in written.strings_from(names)]
        joints = {first + each[0] for first in firsts for each in deleted}
        self._joints = _either(written.words(sorted(joints)))
        self._literals = [each.encode() for each in deleted]
        self._deleted = _either(written.words(deleted))
        short = {
            b"\\" + written.SHORT[one].encode() for one in "".join(deleted) if one in written.SHORT
        }
        self._escapes = {b"\\u", *short}
        self._overlap = written.MOST_BYTES * max(map(len, ["a" * (MOST + 1), *deleted]))

    def has(self, raw: bytes) -> bool:
        """Whether the body is one."""
        if not any(hint in raw for hint in self._hints):
            return False
        if any(self._finds(each, raw) for each in (self._texts, *self._names)):
            return True
        return bool(self._literals) and self._finds(self._joints, raw) and self._has_deleted(raw)

    def _has_deleted(self, raw: bytes) -> bool:
        if any(literal in raw for literal in self._literals):
            return True
        is_escaped = any(escape in raw for escape in self._escapes)
        return is_escaped and self._finds(self._deleted, raw)

    def _finds(self, pattern: re.Pattern[bytes], raw: bytes) -> bool:
        return any(
            pattern.search(raw, start, start + PIECE + self._overlap)
            for start in range(0, len(raw), PIECE)
        )


def _either(patterns: Iterable[bytes]) -> re.Pattern[bytes]:
    return re.compile(b"|".join(patterns) or rb"(?!)")


def _pairs(tokens: Iterable[str]) -> list[bytes]:
    """Patterns of what a body has that has a token, or a string that ends with a token's
    beginning: two characters, of which either may be escaped. Where JSON is in a string, a
    backslash may be escaped too."""
    patterns = [rb"\\u(?i:005c)", TWICE]
    for first, rest in by_start(tokens):
        seconds = {re.escape(each.encode()[:1]) for each in rest}
        behind = b"(?:" + b"|".join(sorted(seconds | {rb'["\\\s]', rb"[\xc2\xe1-\xe3]"})) + b")"
        code = first.encode("utf-16-be")[:2].hex()
        escape = rb"\\u(?i:" + code.encode() + b")"
        patterns += [re.escape(first.encode()) + behind, escape]
        if first in '"\\/' or first < " ":
            patterns.append(rb"\\[\"\\/bfnrt]")
    return patterns


def _beginning(rest: str) -> str:
    """As much of a name as few others begin with."""
    word = WORDS.match(rest)
    assert word is not None
    return rest[: min(max(word.end() + 1, 2), MOST)]


def _rare(rest: str) -> str:
    """The character of it that fewest bodies have."""
    word = WORDS.match(rest)
    assert word is not None
    return rest[word.end() :][:1] or '"'


def _hint(one: str) -> bytes:
    """What is in each body that has the character without a \\u."""
    return b"\\" if one < " " else one.encode()
