"""Whether the bytes of a body may have something, however its JSON is written.

Each character may be escaped. Where JSON is in a string, a backslash may be escaped too; one that
is written as a number is suspect by itself.

All patterns begin with one certain byte, and try others only behind it: bodies are long.
"""

import re
from collections.abc import Collection, Iterable, Iterator

SHORT = {'"': '"', "\\": "\\", "/": "/", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
QUOTES = (b'"', rb"\\u0022")
MOST_BYTES = 16  # of one written character


def words(texts: Iterable[str]) -> list[bytes]:
    """Patterns of all ways to write one of them."""
    return [way + _written(text[1:]) for text in texts for way in _ways(text[0])]


def strings_from(beginnings: Collection[str]) -> list[bytes]:
    """Patterns of strings that begin so; one for each way to write their quote."""
    if not beginnings:
        return []
    leads = {re.escape(each[0].encode()[:1]) for each in beginnings}
    soon = rb"(?=[\\" + b"".join(sorted(leads)) + b"])"
    found = soon + b"(?:" + b"|".join(map(_written, sorted(beginnings))) + b")"
    return [quote + found for quote in QUOTES]


def _written(text: str) -> bytes:
    return b"".join(b"(?:" + b"|".join(_ways(one)) + b")" for one in text)


def _ways(one: str) -> Iterator[bytes]:
    yield re.escape(one.encode())
    code = one.encode("utf-16-be").hex()
    units = [code[start : start + 4].encode() for start in range(0, len(code), 4)]
    yield b"".join(rb"\\\\?u(?i:" + unit + b")" for unit in units)
    if one in SHORT:
        yield rb"\\\\{0,2}" + re.escape(SHORT[one].encode())
