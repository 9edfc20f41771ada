"""Names that a mistyped one may have meant."""

from collections.abc import Iterable
from heapq import nlargest

MOST = 3
ENOUGH = 0.5  # of the longer name


def similar(name: str, names: Iterable[str]) -> list[str]:
    """The names that share the most of their beginning and end with this one, best first. It takes
    microseconds for each name, where difflib can take milliseconds."""
    scores = {each: _score(name, each) for each in names}
    return [
        each for each in nlargest(MOST, scores, key=scores.__getitem__) if scores[each] >= ENOUGH
    ]


def _score(a: str, b: str) -> float:
    """The share of the longer name that both begin or end with."""
    begin = _common(a, b)
    end = _common(a[begin:][::-1], b[begin:][::-1])
    return (begin + end) / max(len(a), len(b), 1)


def _common(a: str, b: str) -> int:
    """The characters that both begin with."""
    different = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(different, min(len(a), len(b)))
