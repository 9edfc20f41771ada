"""What changes in a body so that vLLM's application can read it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MAX_NAMES = 32  # largest number of names in the header


def same(after: Sequence[Any], before: Sequence[Any]) -> bool:
    """Return whether two lists have the very same items."""
    return len(after) == len(before) and all(a is b for a, b in zip(after, before, strict=True))


@dataclass(slots=True)
class Rewritten:
    """The changed fields of a body, and what is left out."""

    changed: dict[str, Any] = field(default_factory=dict)  # field -> value; None: it is removed
    left_out: dict[str, None] = field(default_factory=dict)  # types of tools, blocks and items

    def put(self, name: str, before: Sequence[Any], after: Sequence[Any]) -> None:
        """Set a field of the body if the value has changed."""
        if not same(after, before):
            self.changed[name] = after

    def put_tools(self, kept: Sequence[Mapping[str, Any]], *, keeps_choice: bool) -> None:
        """Set the tools. Without tools, and without the tool that is forced, none can be forced."""
        self.changed["tools"] = kept or None
        if not kept or not keeps_choice:
            self.changed["tool_choice"] = None

    def leave_out(self, kind: str) -> None:
        """Note that the body has something of this type, which is left out."""
        if len(self.left_out) < MAX_NAMES:
            self.left_out[kind] = None
