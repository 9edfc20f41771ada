"""Patterns of where one of many words begins."""

import re
from collections.abc import Iterable, Iterator

from kvroute.router.prompts.segments import any_of


def by_start(words: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    """First characters, and what follows them."""
    given = list(words)
    for first in sorted({word[0] for word in given}):
        yield first, [word[1:] for word in given if word[0] == first]


def starts_of(words: Iterable[str]) -> re.Pattern[str]:
    """Of the first character of each, also where words overlap."""
    starts = [f"{re.escape(first)}(?={any_of(rest)})" for first, rest in by_start(words)]
    return re.compile("|".join(starts) or r"(?!)")
