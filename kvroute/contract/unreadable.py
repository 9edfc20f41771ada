"""Counts items from other processes, such as records, that a process cannot decode and so skips."""

import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NewType, get_args

import msgspec

Kind = Literal[
    "replica",
    "router",
    "message",
    "change",
    "blocks",
    "cluster",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
FeatureKind = NewType("FeatureKind", str)  # a kind of one feature (Feature.unreadable)
# What operators can do if another program may have written what is unreadable.
FOREIGN = "does another program write to this Redis? give each cluster its own --cluster"
REASON_CHARS = 300  # longest reason or name that is kept, since other processes choose them

# The errors that decoding arbitrary bytes may raise.
DECODE_ERRORS = (ValueError, RecursionError, msgspec.MsgspecError)


class UnreadableError(ValueError):
    """The data can be decoded, but this process cannot use it; the message says why."""


@dataclass(frozen=True, slots=True)
class Example:
    """The latest unreadable item of a kind."""

    name: str  # name of the item; empty: it has none
    reason: str
    at_s: float  # time at which the item was skipped, on the monotonic clock


class Unreadable:
    """The unreadable items that one process has skipped for one model: counts and examples.

    Args:
        further: the kinds of features.
    """

    def __init__(self, further: Iterable[str] = ()) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys((*KINDS, *further), 0))
        self.last: dict[str, Example] = {}

    def add(self, kind: Kind | FeatureKind, name: str | bytes, error: Exception | str) -> str:
        """Count one skipped item, and return the reason in words."""
        shown = name if isinstance(name, str) else name.decode(errors="backslashreplace")
        reason = (str(error) or type(error).__name__)[:REASON_CHARS]
        self.counts[kind] += 1
        self.last[kind] = Example(shown[:REASON_CHARS], reason, time.monotonic())
        return reason

    def report(self) -> Mapping[str, dict[str, Any]]:
        """Return the count and the latest example of each kind that has unreadable items."""
        now_s = time.monotonic()
        return {
            kind: {
                "count": self.counts[kind],
                "last": example.name,
                "reason": example.reason,
                "age_s": round(now_s - example.at_s, 1),
            }
            for kind, example in self.last.items()
        }


def text(packed: bytes) -> str:
    """Decode a key or an id. Raises UnreadableError for bytes that are not UTF-8."""
    try:
        return packed.decode()
    except UnicodeDecodeError:
        raise UnreadableError("it is not UTF-8 text") from None
