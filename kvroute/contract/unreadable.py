"""Data of other writers that cannot be decoded is skipped, counted, and reported to users."""

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

Kind = Literal[
    "replica",
    "router",
    "message",
    "change",
    "blocks",
    "prefix",
    "audit",
    "cluster",
    "response",
    "account",
]
KINDS: tuple[Kind, ...] = get_args(Kind)
REASON_CHARS = 300  # the most that is kept of a reason or a name: other writers chose them

DECODE_ERRORS = (
    ValueError,
    RecursionError,
    msgspec.MsgspecError,
)  # what decoding arbitrary bytes may raise


class UnreadableError(ValueError):
    """The data is well-formed but not valid here; the message says why."""


@dataclass(frozen=True, slots=True)
class Example:
    name: str  # of the unreadable item, as far as it has one
    reason: str
    at_s: float  # on the monotonic clock


class Unreadable:
    """For one process and model: how many items of each kind were skipped, and the last one."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter(dict.fromkeys(KINDS, 0))
        self.last: dict[Kind, Example] = {}

    def add(self, kind: Kind, name: str | bytes, error: Exception | str) -> str:
        """Counts one skipped item and returns the reason in words."""
        shown = name if isinstance(name, str) else name.decode(errors="backslashreplace")
        reason = (str(error) or type(error).__name__)[:REASON_CHARS]
        self.counts[kind] += 1
        self.last[kind] = Example(shown[:REASON_CHARS], reason, time.monotonic())
        return reason

    def report(self) -> Mapping[str, dict[str, Any]]:
        """The kinds with skipped items, for users."""
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
    """Decodes a key or an id. Raises UnreadableError for bytes that are no text."""
    try:
        return packed.decode()
    except UnicodeDecodeError:
        raise UnreadableError("it is no text") from None
