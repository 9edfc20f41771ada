"""Compares what a command prints with what a document shows after the command.

Words must be equal. These may differ:

- numbers, also those with a unit such as `12ms`, and ids: a word with a digit in the document;
- the number of consecutive lines of one form, such as the rows of a table;
- what a line `...` stands for;
- in JSON, the number of items in a list.
"""

import json
import re

NUMBER = r"[~*]?(?:-|\d[\d.,:]*)"
PART = re.compile(r"[~*]?\d[\d.,:]*(?=\W|[a-z%]{1,2}\b|$)|\w*\d\w*")  # number or id in a word
ELLIPSIS = "..."


def is_as_shown(shown: str, printed: str) -> bool:
    """Return whether a command printed what the document shows, but for numbers and ids."""
    try:
        return _is_alike(json.loads(shown), json.loads(printed))
    except ValueError:
        return _is_text_alike(shown, printed)


def _is_text_alike(shown: str, printed: str) -> bool:
    return re.fullmatch(_pattern(shown), printed.strip() + "\n") is not None


def _pattern(shown: str) -> str:
    lines = [_line(line) for line in shown.splitlines() if line.strip()]
    rows = [line for line, before in zip(lines, ["", *lines], strict=False) if line != before]
    return "".join(rows)


def _line(line: str) -> str:
    if line.strip() == ELLIPSIS:
        return r"(?:.*\n)*?"
    words = r"\s+".join(_word(word) for word in line.split())
    return rf"(?:\s*{words}\s*\n)+"


def _word(word: str) -> str:
    """Return a pattern for a word: as it is, but for its numbers and ids."""
    if word == "-":
        return NUMBER
    pieces, end = [], 0
    for found in PART.finditer(word):
        is_id = re.search("[A-Za-z]", found[0]) is not None
        pieces += [re.escape(word[end : found.start()]), r"\w+" if is_id else NUMBER]
        end = found.end()
    return "".join([*pieces, re.escape(word[end:])])


def _is_alike(shown: object, printed: object) -> bool:
    """Return whether a JSON value has the members of another one."""
    if isinstance(shown, dict):
        return (
            isinstance(printed, dict)
            and [*shown] == [*printed]
            and all(_is_alike(shown[name], printed[name]) for name in shown)
        )
    if isinstance(shown, list):
        return isinstance(printed, list) and all(
            any(_is_alike(each, item) for each in shown) for item in printed
        )
    if isinstance(shown, str):
        return isinstance(printed, str) and _is_text_alike(shown, printed)
    if isinstance(shown, bool) or shown is None:
        return shown is printed
    return isinstance(printed, int | float)
